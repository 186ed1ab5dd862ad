"""Runs: their folders, their records, and the index that finds them again."""
