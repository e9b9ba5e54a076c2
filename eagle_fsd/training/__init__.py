"""Draft heads: their data, their training, the measures and the publication of what came out."""
