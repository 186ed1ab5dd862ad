"""Everything that talks to Ray: finding the cluster, numbering it, holding it."""
