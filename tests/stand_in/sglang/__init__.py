"""Stands in for SGLang."""
