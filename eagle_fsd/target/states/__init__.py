"""Recurrent layers in a tree: states for each node, beside the keys and values of attention."""
