"""How bytes get from one place to another: one file for each mover, and the choice between them."""
