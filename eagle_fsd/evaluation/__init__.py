"""Measuring: acceptance lengths and equality with the target. Scripts in eval/ call it."""
