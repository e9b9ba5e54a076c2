"""Which tree a step's texts get: where many texts fill the processor, drafts for each are worth less."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from eagle_fsd.core.config import TreeConfig
from eagle_fsd.decoding.request import Text


class StepTrees:
    """The tree of every text, and smaller ones for steps of many texts.

    crowded: by the number of texts from which on they are taken, in steps whose texts all get the same tokens
    with any tree (Terms.any_tree). Raises ValueError for one that is larger than `tree`.
    """

    def __init__(self, tree: TreeConfig, crowded: Mapping[int, TreeConfig] | None) -> None:
        self.tree, self.crowded = tree, dict(crowded or {})
        for size, one in self.crowded.items():
            if not tree.holds(one):
                raise ValueError(
                    f"crowded has the tree {one} for {size} texts: it must be no larger than {tree}; lower it"
                )

    def of(self, texts: Sequence[Text], active: Sequence[Text]) -> TreeConfig:
        """Return the tree of a step of these texts, of which `active` ones are not done."""
        sizes = [size for size in self.crowded if size <= len(texts)]
        if sizes and all(text.terms.any_tree for text in active):
            return self.crowded[max(sizes)]
        return self.tree
