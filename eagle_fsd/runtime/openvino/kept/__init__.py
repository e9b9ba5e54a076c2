"""What a start leaves behind for the next one: converted graphs, and which of them it compiled."""
