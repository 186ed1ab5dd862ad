"""One file for each command, each with a function of the same name; `roost.cli.main` lists them."""
