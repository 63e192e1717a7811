"""The decisions of the server. Pure: no I/O, threads or clocks; callers pass the time."""
