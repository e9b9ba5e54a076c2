"""A head that goes on learning while it drafts."""
