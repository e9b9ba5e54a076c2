"""Learning-free drafts: tokens that followed before, in the text or in the target's own distributions."""
