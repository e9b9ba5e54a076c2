"""The flags of the programs: those that name a model, and those that change its text."""
