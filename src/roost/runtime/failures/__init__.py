"""The life of one exception, from the worker that raises it to the caller that catches it."""
