"""One machine: its devices, ports, processes, allowances and disks. No Ray."""
