"""What changes the logits at every node of a tree."""
