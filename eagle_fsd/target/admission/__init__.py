"""What a model must pass to be a target, and with what it is compared."""
