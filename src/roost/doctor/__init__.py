"""`roost doctor`: what would hinder a job on this machine and on the cluster, and what to do about it.

facts           facts of a machine and of a cluster, values only
findings        what a rule returns, and how findings of several nodes are merged
machine_facts   collects the facts of one machine, without Ray; also the short task that does so on each node
cluster_facts   runs that task on all nodes
machine_rules   pure: facts of a machine -> findings
cluster_rules   pure: facts of a cluster -> findings
examine         all of it; the cluster part runs in a child process, since Ray may end that
child           that process
"""
