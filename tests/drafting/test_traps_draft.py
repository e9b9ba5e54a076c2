"""Traps of the drafting path: positions, features, weights. If all is right, the head is exact: tau is 6.0.

Most tests end with the bug itself, made on purpose: the number that the test pins must then differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from support.drafters import eagle_drafter, feed
from support.trap_models import exact_engine, exact_pair, random_head, random_llama, random_tokens
from torch import Tensor
from transformers import LlamaModel

from eagle_fsd import EagleFSD, Fuzzy, HeadConfig, Lossless, TreeConfig
from eagle_fsd.core import tree as trees
from eagle_fsd.core.tree import DraftTree, rerank
from eagle_fsd.decoding import loop
from eagle_fsd.drafting import tree_growth
from eagle_fsd.drafting.eagle_drafter import EaglePredictor
from eagle_fsd.drafting.eagle_head import DraftHead
from eagle_fsd.drafting.tree_growth import BeamDrafter
from eagle_fsd.hub import load_target
from eagle_fsd.hub.head_checkpoint import read_head, read_tensors, save_head
from eagle_fsd.target.model import TargetModel
from eagle_fsd.target.session import TargetSession

TREE = TreeConfig(16, 5, 8)
FULL = TREE.depth + 1.0  # tau of an exact head
LOST = 0.5 * FULL  # a trap of the drafting path costs at least half of it here


def tau(engine: EagleFSD, rule: Lossless | Fuzzy | None = None, prompt_length: int = 12) -> float:
    """Return tokens per step over ten full steps of two prompts; check the text at T = 0."""
    rule = rule or Lossless()
    prompts = random_tokens(2, prompt_length)
    output = engine.generate(prompts, max_new_tokens=60, rule=rule, tree=TREE)
    if rule == Lossless():
        assert output.new_tokens == engine.target_alone(prompts, max_new_tokens=60).new_tokens
    return sum(s.new_tokens for s in output.stats) / sum(s.steps for s in output.stats)


def shifted_rotary(offset: int) -> Callable[[DraftHead, Tensor, torch.dtype], tuple[Tensor, Tensor]]:
    """Return DraftHead.rotary with drafted nodes (forwards of top_k pairs) `offset` positions further on."""
    right = DraftHead.rotary
    return lambda head, ids, dtype: right(head, ids + offset * (ids.shape[1] == TREE.top_k), dtype)


def test_trap_01_draft_rope_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 1: rotary off by one: pair j sits at j, the first tree level at len(prefix + root) - 1."""
    engine = exact_engine()
    positions: list[list[int]] = []
    engine.head.register_forward_pre_hook(lambda _, args: positions.append(args[2][0].tolist()))
    engine.generate(random_tokens(1, 12), max_new_tokens=7, rule=Lossless(), tree=TREE)
    levels = [[position] * TREE.top_k for position in (11, 12, 13, 14)]
    assert positions[:6] == [list(range(11)), *levels, list(range(11, 17))]
    assert tau(engine) == FULL
    for offset in (-1, 1):
        with monkeypatch.context() as patch:
            patch.setattr(DraftHead, "rotary", shifted_rotary(offset))
            assert tau(engine) < LOST


def forked_tree(batch: int, vocab_size: int) -> DraftTree:
    """Two branches below the root, so that siblings share positions: 0 -> (1 -> (3, 4 -> 6), 2 -> 5)."""
    parents = torch.tensor([-1, 0, 0, 1, 1, 2, 4]).expand(batch, -1)
    return DraftTree(
        tokens=random_tokens(batch, 7, vocab_size, seed=1),
        parents=parents,
        depths=torch.tensor([0, 1, 1, 2, 2, 2, 3]).expand(batch, -1),
        log_q=torch.empty(batch, 0, vocab_size),
        owners=torch.empty(batch, 0, dtype=torch.int64),
        depth=3,
    )


def verification_error(target: TargetModel, tree: DraftTree) -> float:
    """Return the largest difference of a tree's logits from plain forwards over its paths, on ragged rows."""
    lengths, prompts = [9, 5], random_tokens(2, 9, target.vocab_size)
    worst = 0.0
    with torch.inference_mode():
        session = TargetSession(target, batch=2, capacity=32)
        session.prefill(prompts, lengths)
        logits, _ = session.verify(tree)
        for row, length in enumerate(lengths):
            for path in ([0, 1, 3], [0, 1, 4, 6], [0, 2, 5]):
                text = torch.cat((prompts[row, :length], tree.tokens[row, path]))
                plain = target.model(text[None]).logits[0, length:]
                worst = max(worst, (logits[row, path] - plain).abs().max().item())
    return worst


def test_trap_02_positions_by_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 2: positions by flat node index: a node of depth i sits at len(prefix) + i, its siblings too."""
    target = TargetModel(random_llama())
    tree = forked_tree(2, target.vocab_size)
    seen: list[Tensor] = []
    hook = target.decoder.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["position_ids"]), with_kwargs=True
    )
    assert verification_error(target, tree) < 1e-4
    hook.remove()
    assert seen[1].tolist() == [[9, 10, 10, 11, 11, 11, 12], [5, 6, 6, 7, 7, 7, 8]]
    flat = dataclasses.replace(tree, depths=torch.arange(7).expand(2, -1))
    assert verification_error(target, flat) > 0.1


def is_connected(tree: DraftTree) -> bool:
    """Return whether every node but the root has its parent before it, one level up."""
    nodes = torch.arange(1, tree.parents.shape[1])
    parents = tree.parents[:, 1:]
    levels = tree.depths.gather(1, parents.clamp(min=0)) + 1
    return bool(((parents >= 0) & (parents < nodes) & (levels == tree.depths[:, 1:])).all())


def first_tree(engine: EagleFSD, config: TreeConfig) -> DraftTree:
    """Return the tree drafted after a random prompt."""
    tokens = random_tokens(1, 12, engine.target.vocab_size)
    with torch.inference_mode():
        features = TargetSession(engine.target, 1, 64).prefill(tokens[:, :-1], [11])
        drafter = eagle_drafter(engine.head, engine.target, 1, 128, engine.device)
        feed(drafter, features, tokens[:, 1:], [11])
        return drafter.draft(tokens[:, -1], config)


def deepest_first(scores: Tensor, count: int) -> Tensor:
    """Rerank with ties broken the wrong way."""
    last = scores.shape[1] - 1
    ranked = last - scores.flip(1).sort(dim=1, descending=True, stable=True).indices
    return ranked[:, :count].sort(dim=1).values


def test_trap_03_parents_before_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 3: log-probability 0.0 ties a child with its parent; a tie broken deeper first orphans it."""
    certain = exact_engine(sharpness=1000.0)
    config = TreeConfig(4, 5, 8)
    tree = first_tree(certain, config)
    assert tree.log_q.dtype == torch.float32
    assert tree.log_q[0, 0].max() == 0.0
    assert is_connected(tree) and tree.parents.tolist() == [[-1, 0, 1, 2]]
    for size in (2, 16, 60):
        assert is_connected(first_tree(certain, TreeConfig(size, 5, 8)))
        assert is_connected(first_tree(exact_engine(sharpness=0.1), TreeConfig(size, 5, 8)))
    ties = torch.tensor([[0.0, -1.0, 0.0, -1.0, 0.0]])  # levels 1, 1, 2, 2, 3
    assert rerank(ties, 2).tolist() == [[0, 2]]
    monkeypatch.setattr(trees, "rerank", deepest_first)
    monkeypatch.setattr(TreeConfig, "reach", property(lambda size: size.depth))  # or no level is to spare
    assert not is_connected(first_tree(certain, config))


def test_trap_03_scores_in_float32() -> None:
    """Trap 3: scores in half precision tie where they differ; a bf16 target's trees rank in float32."""
    model, head = random_llama(), random_head(random_llama())
    tree = first_tree(EagleFSD(TargetModel(model.bfloat16()), head), TREE)
    assert tree.log_q.dtype == torch.float32
    assert is_connected(tree)
    scores = torch.tensor([[-2.001, -2.0]])
    assert rerank(scores, 1).tolist() == [[1]]
    assert rerank(scores.bfloat16(), 1).tolist() == [[0]]


def commit_with_drafted(
    predictor: EaglePredictor,
    features: Tensor,
    tokens: Tensor,
    counts: Sequence[int],
    first: bool = False,
    media: object = None,
) -> Tensor:
    """Commit drafted features: only the last accepted token has its true feature."""
    if first:  # a prompt has true features only
        predictor.state = RIGHT_COMMIT(predictor, features, tokens, counts, first)
        return predictor.state
    (count,) = counts
    for pair in range(count):
        true = pair == count - 1
        feature = features[:, pair : pair + 1] if true else predictor.state[:, None]
        predictor.state = RIGHT_COMMIT(predictor, feature, tokens[:, pair : pair + 1], [1])
    return predictor.state


RIGHT_COMMIT = EaglePredictor.commit_pairs


def tau_alone(engine: EagleFSD) -> float:
    output = engine.generate(random_tokens(1, 12), max_new_tokens=60, rule=Lossless(), tree=TREE)
    return output.stats[0].tau


def test_trap_05_head_cache_from_true_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 5: the head's KV of accepted tokens stays as drafted, from predicted instead of true features."""
    engine = exact_engine()
    assert tau_alone(engine) == FULL
    seen: list[tuple[Tensor, Tensor, list[int]]] = []
    with monkeypatch.context() as patch:

        def record(
            predictor: EaglePredictor,
            features: Tensor,
            tokens: Tensor,
            counts: Sequence[int],
            first: bool = False,
            media: object = None,
        ) -> Tensor:
            seen.append((features, tokens, list(counts)))
            return RIGHT_COMMIT(predictor, features, tokens, counts, first)

        patch.setattr(EaglePredictor, "commit_pairs", record)
        prompt = random_tokens(1, 12)
        text = engine.generate(prompt, max_new_tokens=30, rule=Lossless(), tree=TREE).sequences
    with torch.inference_mode():
        true = engine.target.model.model(text).last_hidden_state
    learnt = torch.cat([features[:, : counts[0]] for features, _, counts in seen], dim=1)
    assert torch.allclose(learnt, true[:, : learnt.shape[1]], atol=1e-4)
    tokens = torch.cat([tokens[:, : counts[0]] for _, tokens, counts in seen], dim=1)
    assert torch.equal(tokens, text[:, 1 : 1 + tokens.shape[1]])
    assert text.shape[1] - tokens.shape[1] <= TREE.depth + 2, "all but the last step was learnt"
    monkeypatch.setattr(EaglePredictor, "commit_pairs", commit_with_drafted)
    assert tau_alone(engine) < LOST


def test_trap_14_tied_lm_head() -> None:
    """Trap 14: a tied lm_head is missed, so that draft and target read their features with other weights."""
    for tied in (False, True):
        model = random_llama(tie_word_embeddings=tied)
        target = TargetModel(model)
        tokens = random_tokens(1, 8, target.vocab_size)
        with torch.inference_mode():
            features = TargetSession(target, 1, 8).prefill(tokens, [8])
            assert torch.allclose(target.logits(features), model(tokens).logits, atol=1e-4)
    with pytest.raises(ValueError, match="without an lm_head"):
        TargetModel(LlamaModel(random_llama().config))


def test_trap_14_target_without_lm_head_weights(tmp_path: Path) -> None:
    """Trap 14: a target whose files lack an untied lm_head loads with a random one in silence."""
    model = random_llama()
    whole = model.state_dict()
    model.save_pretrained(tmp_path / "whole")
    load_target(str(tmp_path / "whole"), dtype=torch.float32, device="cpu")
    part = {key: value for key, value in whole.items() if key != "lm_head.weight"}
    model.save_pretrained(tmp_path / "part", state_dict=part)
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        load_target(str(tmp_path / "part"), dtype=torch.float32, device="cpu")


def test_trap_14_strict_head(tmp_path: Path) -> None:
    """Trap 14: a strict=False load keeps random weights, a loose T hides it: the lossless tau is pinned."""
    from safetensors.torch import save_file

    target, head = exact_pair()
    file = save_head(head, tmp_path / "head") / "model.safetensors"
    sizes = (head.config.hidden_size, head.config.vocab_size)
    engine = EagleFSD(TargetModel(target), read_head(file, "head", *sizes))
    assert tau(engine) == FULL
    tensors = read_tensors(file)
    for key in tensors:
        part = {name: value for name, value in tensors.items() if name != key}
        save_file(part, file)
        if key == "fc.bias":  # optional in the layout: without it a head is another, not a random one
            continue
        with pytest.raises(ValueError, match=key.replace(".", r"\.")):
            read_head(file, "head", *sizes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        careless = DraftHead(head.config)
    careless.load_state_dict({k: v for k, v in tensors.items() if k != "fc.weight"}, strict=False)
    broken = EagleFSD(TargetModel(target), careless)
    assert tau(broken) < LOST
    assert tau(broken, Fuzzy(threshold=float("inf"), mode="paper")) == FULL


def test_trap_15_beyond_trained_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 15: a head past the positions it was trained for must go on with true positions."""
    target, head = exact_pair()
    config = dataclasses.replace(head.config, max_position_embeddings=16)
    short = DraftHead(config)
    short.load_state_dict(head.state_dict())
    engine = EagleFSD(TargetModel(target), short)
    assert tau(engine, prompt_length=12) == FULL  # crosses position 16 while generating
    assert tau(engine, prompt_length=40) == FULL
    right = DraftHead.rotary
    monkeypatch.setattr(DraftHead, "rotary", lambda head, ids, dtype: right(head, ids.clamp(max=15), dtype))
    assert tau(engine, prompt_length=40) < LOST


def test_trap_15_half_precision_positions() -> None:
    """Trap 15: in half precision far positions collide, unless the rotary angles are taken in float32."""
    head = DraftHead(HeadConfig(32, 64, 4, 2, 8, 64)).bfloat16()
    positions = torch.arange(2040, 4100)[None]
    cos, sin = head.rotary(positions, torch.float32)
    angles = torch.atan2(sin, cos)[0, 0, :, 0]  # of frequency 1
    assert (angles[1:] - angles[:-1]).remainder(2 * torch.pi).sub(1.0).abs().max() < 1e-3
    assert torch.equal(positions[0, 10].bfloat16(), positions[0, 11].bfloat16())


def test_trap_19_broken_draft_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 19: at T = 0 the text is right whatever is drafted: equality proves nothing of the draft path."""
    engine = exact_engine()
    assert tau(engine) == FULL  # checks the text as well
    with monkeypatch.context() as patch:
        patch.setattr(
            tree_growth, "best_children", lambda log_q, top_k: (-log_q).topk(top_k, dim=-1)
        )  # drafts what is least likely
        assert tau(engine) == 1.0  # and the text, checked in there, is still right
    with torch.no_grad():
        engine.head.fc.weight.zero_()
    assert tau(engine) < LOST


def test_trap_20_wrong_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 20: the head is fed the hidden state before the target's final norm instead of after it."""
    engine = exact_engine()
    assert tau(engine) == FULL
    before: list[Tensor] = []
    engine.target.decoder.norm.register_forward_pre_hook(lambda _, args: before.append(args[0]))
    right_prefill, right_verify = TargetSession.prefill, TargetSession.verify

    def prefill(session: TargetSession, tokens: Tensor, lengths: Sequence[int]) -> Tensor:
        right_prefill(session, tokens, lengths)
        return before[-1]

    def verify(session: TargetSession, tree: DraftTree) -> tuple[Tensor, Tensor]:
        return right_verify(session, tree)[0], before[-1]

    monkeypatch.setattr(TargetSession, "prefill", prefill)
    monkeypatch.setattr(TargetSession, "verify", verify)
    assert tau(engine) < LOST


def test_trap_20_feature_of_the_wrong_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 20: the head is fed the feature of the token itself, not of the one before it."""
    engine = exact_engine()
    right = loop.keep

    def keep(
        target: TargetSession, drafter: BeamDrafter, verdict: object, features: Tensor, *rest: object
    ) -> Tensor:
        return right(target, drafter, verdict, features.roll(1, dims=1), *rest)

    monkeypatch.setattr(loop, "keep", keep)
    assert tau(engine) < LOST
