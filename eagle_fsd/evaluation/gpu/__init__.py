"""The check of a machine with a GPU: independent parts, each of which goes its own way if another fails."""
