"""Words and pure functions: no model, no file."""
