"""What differs in training an EAGLE-3 head: its loss, and how a new one is made."""
