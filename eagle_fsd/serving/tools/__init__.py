"""Forms of answers and calls of functions in requests."""
