"""From rows to points with intervals; no model."""
