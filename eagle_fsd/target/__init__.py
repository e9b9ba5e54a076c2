"""Hugging Face decoders as verifiers of draft trees. Only this folder looks inside Hugging Face's models."""

from eagle_fsd.target.model import TargetModel

__all__ = ["TargetModel"]
