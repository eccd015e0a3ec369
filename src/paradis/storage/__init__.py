"""What survives a process: the metadata store and checkpoints."""
