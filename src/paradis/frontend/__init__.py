"""What the training script touches: the wrapped optimizer and its hooks."""
