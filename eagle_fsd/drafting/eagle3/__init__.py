"""EAGLE-3 heads (Li et al. 2025, arXiv 2503.01840): networks that read the target's residual stream."""
