"""Files: atomic writes, JSON Lines, tensors, small records, and where results come from."""
