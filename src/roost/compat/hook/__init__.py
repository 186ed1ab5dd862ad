"""On the path of every Python below `roost compat`."""
