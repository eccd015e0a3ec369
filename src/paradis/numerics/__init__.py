"""Pure torch: tensors in, tensors out; no clock, no IO, no knowledge of core."""
