"""Shared data types and pure functions. Nothing here knows a model or a file."""
