"""What a draft vocabulary drafts beside its list: the tokens that a text has had itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.tiny_models import HIDDEN, VOCAB, tiny_head, tiny_model
from torch import nn

from eagle_fsd import EagleFSD
from eagle_fsd.drafting.draft_vocabulary import DraftVocabulary
from eagle_fsd.drafting.eagle_drafter import EagleSpec
from eagle_fsd.drafting.text_tokens import TextTokens
from eagle_fsd.target.model import TargetModel

LISTED = [3, 9, 40, 2]


class Target:
    """Embeddings, and an lm_head whose logits are capped. plain: whether it is a product with its rows."""

    device = torch.device("cpu")

    def __init__(self, plain: bool = True) -> None:
        torch.manual_seed(1)
        product = nn.Linear(HIDDEN, VOCAB).requires_grad_(False)
        self.lm_head = product if plain else nn.Sequential(product)
        self.embed = nn.Embedding(VOCAB, HIDDEN).requires_grad_(False)

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        return self.transform_logits(self.lm_head(features).float())

    def transform_logits(self, logits: torch.Tensor) -> torch.Tensor:
        return 4 * (logits / 4).tanh()


def plain_logits(target: Target, features: torch.Tensor, own: list[set[int]]) -> torch.Tensor:
    """The slow twin: the logits of all tokens, -inf at what is neither in the list nor a row's own."""
    logits = target.logits(features).clone()
    for row, tokens in enumerate(own):
        for token in range(VOCAB):
            if token not in LISTED and token not in tokens:
                logits[row, :, token] = -torch.inf
    return logits


def whole(tokens: TextTokens, features: torch.Tensor) -> torch.Tensor:
    """Return the logits over the whole vocabulary."""
    own = tokens.now()
    drafted = tokens.vocabulary.token_ids if own is None else own.drafted
    few = tokens.vocabulary.logits(features, own)
    assert few.shape[-1] == len(drafted) == len(set(drafted.tolist()))
    everywhere = few.new_full((*few.shape[:-1], VOCAB), -torch.inf)
    return everywhere.index_copy_(-1, drafted, few)


def start(
    rows: int, most: int = 3, fixed: bool = False, plain: bool = True
) -> tuple[TextTokens, Target, torch.Tensor]:
    """Return the tokens of new texts, the target, and features [rows, 2, d]."""
    target = Target(plain)
    features = torch.randn(rows, 2, HIDDEN, generator=torch.Generator().manual_seed(0))
    listed = DraftVocabulary(target, torch.tensor(LISTED))
    assert (listed.lm_head is None) is not plain
    return TextTokens(listed, VOCAB, rows, most, fixed), target, features


@pytest.mark.parametrize("fixed", [False, True], ids=["fitted", "fixed"])
@pytest.mark.parametrize("plain", [True, False], ids=["rows", "whole"])
def test_each_text_drafts_the_list_and_its_own_latest_tokens(fixed: bool, plain: bool) -> None:
    tokens, target, features = start(3, fixed=fixed, plain=plain)
    torch.testing.assert_close(whole(tokens, features), plain_logits(target, features, [set()] * 3))
    assert (tokens.now() is None) is not fixed
    widths = set()
    for texts, own in (
        ([[5, 9], [], [7, 5, 5]], [{5}, set(), {7, 5}]),
        ([[11, 12], [3], [8]], [{5, 11, 12}, set(), {7, 5, 8}]),
        ([[5, 13], [1], []], [{12, 5, 13}, {1}, {7, 5, 8}]),  # 5 was had again, so that 11 is the oldest
        ([[20, 21, 22, 23], [], []], [{21, 22, 23}, {1}, {7, 5, 8}]),
    ):
        tokens.add(texts)
        torch.testing.assert_close(whole(tokens, features), plain_logits(target, features, own))
        widths.add(len(tokens.now().drafted))
        for row, mine in enumerate(own):
            assert {t for t in range(VOCAB) if tokens.drafts(row, t)} == mine | set(LISTED)
    assert (len(widths) == 1) is fixed, "few shapes occur where they shall be few"


def test_texts_keep_their_tokens_as_rows_come_and_go() -> None:
    tokens, target, features = start(3)
    tokens.add([[5], [6, 7], [8]])
    tokens.select([2, 1])
    torch.testing.assert_close(whole(tokens, features[:2]), plain_logits(target, features[:2], [{8}, {6, 7}]))
    twice = start(1)[0]
    twice.add([[5]])
    twice.select([0, 0])
    twice.add([[7], [9]])  # two answers to one prompt share nothing
    torch.testing.assert_close(
        whole(twice, features[:2]), plain_logits(target, features[:2], [{5, 7}, {5, 9}])
    )
    other = start(1)[0]
    other.add([[30, 31]])
    tokens.replace([0], other)
    own = [{30, 31}, {6, 7}]
    torch.testing.assert_close(whole(tokens, features[:2]), plain_logits(target, features[:2], own))
    tokens.load_row(1, [3, 33, 34, 35, 36])
    other.add([[32]])  # they share nothing
    own = [{30, 31}, {34, 35, 36}]
    torch.testing.assert_close(whole(tokens, features[:2]), plain_logits(target, features[:2], own))
    tokens.reset(3)
    assert tokens.now() is None
    tokens.add([[5], [6], [7]])  # the row that had left as well
    torch.testing.assert_close(whole(tokens, features), plain_logits(target, features, [{5}, {6}, {7}]))


def test_where_few_shapes_may_occur_there_are_powers_of_two() -> None:
    """Of own tokens beside the list: 64 at least, else twice a smaller one. Each is there once."""
    vocabulary = DraftVocabulary(Target(plain=False), torch.tensor(LISTED))
    for had, wanted in ((0, 64), (64, 64), (65, 128), (129, 256)):
        tokens = TextTokens(vocabulary, 1000, rows=2, most=1000, fixed=True)
        tokens.add([range(100, 100 + had), ()])
        own = tokens.now()
        assert own is not None and own.missing is not None and own.missing.shape == (2, wanted)
        assert len(own.drafted) == len(set(own.drafted.tolist())) == len(LISTED) + wanted
        assert int((~own.missing).sum()) == had and own.missing[1].all()


def test_the_number_belongs_to_a_heads_identity_and_needs_a_list() -> None:
    target = TargetModel(tiny_model())
    few = torch.arange(9)
    plain, own = (EagleFSD(target, tiny_head().restrict(few, most)).drafter for most in (None, 4))
    assert isinstance(plain, EagleSpec) and isinstance(own, EagleSpec)
    assert plain.identity != own.identity == f"{plain.identity}-text4"
    assert tiny_head().restrict(None, 4).config.draft_text_tokens is None
    assert tiny_head().restrict(few, 4).restrict(None).config.draft_text_tokens is None
    with pytest.raises(ValueError, match="draft_text_tokens is -1"):
        replace(tiny_head().config, draft_text_tokens=-1)
