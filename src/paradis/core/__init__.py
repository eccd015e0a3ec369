"""Pure decisions: one rule and its invariant per file; no clock, socket, thread or torch."""
