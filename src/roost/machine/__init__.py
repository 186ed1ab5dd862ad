"""What one machine has and does: devices, ports, processes, disks. No Ray."""
