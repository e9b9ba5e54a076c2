"""What is kept of a target: converted weights of a .gguf file, and what a second start needs."""
