"""Groups of workers, called together."""
