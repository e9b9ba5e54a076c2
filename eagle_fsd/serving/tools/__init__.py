"""Forms of answers and function calls in requests."""
