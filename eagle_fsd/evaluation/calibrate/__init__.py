"""Which threshold keeps to a quality budget."""
