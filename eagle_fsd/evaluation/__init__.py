"""Measure speed, acceptance and quality, and report on it. The scripts in eval/ call `commands`."""
