"""Stands in for vLLM: what an engine looks for, and what its part inside vLLM is built on."""
