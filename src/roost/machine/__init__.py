"""What one machine has and does: devices, ports, processes, limits, disks. No Ray."""
