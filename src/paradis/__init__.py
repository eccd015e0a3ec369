"""Paradis: parameter servers and dispatchers, kept apart, for PyTorch."""
