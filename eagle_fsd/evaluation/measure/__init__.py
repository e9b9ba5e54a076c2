"""What runs a model and writes rows of figures."""
