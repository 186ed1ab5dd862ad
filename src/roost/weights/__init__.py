"""Weights from the trainer's layout to the engines': layouts and plans are pure, links act on them."""
