"""What is kept of a .gguf target: its converted weights, and what a second start needs of it."""
