"""Stands in for vLLM: that it can be found is all that is needed."""
