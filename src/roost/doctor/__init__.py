"""`roost doctor`: what on this machine and on the cluster would hinder a job, and what to do about it.

facts           what was seen, and findings
machine_look    looks at one machine, without Ray
node_look       the short task that does so on each node
cluster_look    asks all nodes at once, within a deadline
machine_rules   pure: facts of a machine -> findings
cluster_rules   pure: facts of the cluster -> findings
examine         all of it, the cluster in a child process, which Ray may end
child           that process
"""
