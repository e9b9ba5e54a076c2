"""Runs code that a model wrote, confined."""
