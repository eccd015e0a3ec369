"""The virtual driver: event heap, virtual time and one seed around the same pure roles."""
