"""What a person can see: log records and counters."""
