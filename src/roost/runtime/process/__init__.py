"""What happens inside a worker's process."""
