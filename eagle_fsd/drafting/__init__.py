"""Drafters: they propose the tree of each step."""
