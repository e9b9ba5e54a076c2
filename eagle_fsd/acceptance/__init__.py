"""Which drafted tokens are emitted: acceptance rules, divergences, and what a rule does to the text."""

from eagle_fsd.acceptance.accept import AcceptanceRule, Lossless
from eagle_fsd.acceptance.fuzzy import Fuzzy

__all__ = ["AcceptanceRule", "Fuzzy", "Lossless"]
