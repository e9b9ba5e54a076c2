"""What is written whole or not at all, and who made it."""
