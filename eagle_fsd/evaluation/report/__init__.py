"""From points to tables and plots."""
