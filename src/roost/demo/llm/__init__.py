"""The demo that post-trains a language model: a tiny transformer, real engines, and weights through a link."""
