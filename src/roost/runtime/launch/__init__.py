"""Starting the workers of a group."""
