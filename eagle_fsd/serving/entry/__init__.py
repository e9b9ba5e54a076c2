"""Which requests may come in, and whether an address is reached from this machine only."""
