"""Jobs of other frameworks: launch scripts and configs in, roles with the GPUs of each process out. Pure."""
