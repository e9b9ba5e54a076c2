"""Prompts: how they are read, what they may take of the caches, and what is kept of them for others."""
