"""The code that runs inside a worker's process."""
