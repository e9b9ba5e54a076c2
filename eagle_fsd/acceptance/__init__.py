"""Which drafted tokens are emitted: acceptance rules, divergences, and a rule's effect on the text."""

from eagle_fsd.acceptance.accept import AcceptanceRule, Lossless
from eagle_fsd.acceptance.fuzzy import Fuzzy

__all__ = ["AcceptanceRule", "Fuzzy", "Lossless"]
