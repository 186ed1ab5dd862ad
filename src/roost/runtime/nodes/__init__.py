"""The nodes of a Ray cluster and what Ray knows about them."""
