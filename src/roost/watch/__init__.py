"""A run as one sees it while it runs, or afterwards: read from the run folder alone, in the terminal or on a page."""
