"""This process's connection to Ray."""
