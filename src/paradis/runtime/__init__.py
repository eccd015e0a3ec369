"""The real driver: sockets, threads, clocks and processes around the pure roles."""
