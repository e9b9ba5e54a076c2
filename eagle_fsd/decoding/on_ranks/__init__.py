"""The decoding loop on several ranks: every step's tree and verdict are rank 0's, and others follow it."""
