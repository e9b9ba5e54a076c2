"""Who proposes the tree."""
