"""The best placement of a job, found and proven: the step as a timed event graph, the search, its proof. No Ray."""
