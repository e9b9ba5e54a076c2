"""EAGLE-2 dynamic draft trees, verified by Fuzzy Speculative Decoding, on stock Hugging Face models."""

__version__ = "0.1.0"
