"""Which draft tree is fastest on this machine."""
