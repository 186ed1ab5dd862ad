"""Channels: named queues that every process of a job can use."""
