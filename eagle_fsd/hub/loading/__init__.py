"""A target and what drafts for it, loaded by name and made ready to run on this machine."""
