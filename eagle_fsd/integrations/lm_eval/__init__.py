"""A model of lm-evaluation-harness."""
