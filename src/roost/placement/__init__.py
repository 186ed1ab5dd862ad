"""The pure half: hardware, config, placement and plan as values. No Ray, no clock, no sockets, no printing."""
