"""The folder and the record of a run."""
