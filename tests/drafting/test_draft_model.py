"""A language model as the drafter, against plain forwards of the same model, and inside the decoding loop."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import transformers
from support.drafter_laws import require_same_state
from support.fake_flash import FakeFlash
from support.op_recorder import OpRecorder
from support.tiny_models import VOCAB, greedy_alone, prompts_of, run_loop, tiny_model
from torch import Tensor

import eagle_fsd.core.tree as tree_module
from eagle_fsd import EagleFSD, Fuzzy, TreeConfig
from eagle_fsd.autotune.settle import Settler
from eagle_fsd.core import sampling
from eagle_fsd.core.padding import pad_right
from eagle_fsd.core.tree import DraftTree
from eagle_fsd.drafting import tree_growth
from eagle_fsd.drafting.draft_model import DraftModelSpec
from eagle_fsd.drafting.drafter import Seen
from eagle_fsd.drafting.tree_growth import BeamDrafter
from eagle_fsd.runtime import kv_cache
from eagle_fsd.runtime.step_recorder import Graphs, moved
from eagle_fsd.target.admission import checks
from eagle_fsd.target.first_layers import first_layers
from eagle_fsd.target.model import TargetModel

TREE, CHAIN = TreeConfig(10, 4, 3), TreeConfig(6, 5, 1)
DEEP = TreeConfig(43, 11, 2)  # all of its candidates, whose paths outgrow the families' windows
TARGET = TargetModel(tiny_model())
# Full attention, windows of 8 tokens in all layers or in some, learned positions, a soft-cap.
FAMILIES = {"llama": "sdpa", "mistral": "sdpa", "gemma3": "sdpa", "gpt2": "sdpa", "gemma2": "eager"}
if hasattr(transformers.Cache, "get_conv_state"):
    FAMILIES |= {"qwen3_5": "sdpa", "falcon_h1": "sdpa", "jamba": "sdpa"}


def other_model(family: str = "llama", **sizes: Any) -> TargetModel:
    return TargetModel(tiny_model(family, FAMILIES[family], seed=5, **sizes))


def show(texts: Sequence[Sequence[int]]) -> Seen:
    """Return what a drafter is shown of texts, with junk in the padding."""
    return Seen(pad_right([list(text) for text in texts], VOCAB - 1), [len(text) for text in texts])


def start(spec: DraftModelSpec, texts: Sequence[Sequence[int]]) -> BeamDrafter:
    drafter = spec.make(len(texts), 4, TREE)
    drafter.begin(show(texts))
    return drafter


def roots_of(texts: Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor([text[-1] for text in texts])


def paths_of(tree: DraftTree, row: int) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens[row].tolist(), tree.parents[row].tolist(), strict=True):
        paths.append(() if parent < 0 else (*paths[parent], token))
    return paths


@torch.inference_mode()
def plain_log_q(model: TargetModel, text: Sequence[int], tokens: int = VOCAB) -> Tensor:
    """Return log q after a text, by the model's own forward of all of it, over the first `tokens` tokens."""
    logits = model.model(torch.tensor([list(text)]), use_cache=False).logits[0, -1].float()
    return logits[:tokens].log_softmax(-1)


# --- trees ---


@pytest.mark.covering(1)
@pytest.mark.parametrize(("tree_config", "chunk"), [(TREE, 3), (CHAIN, 512), (DEEP, 512)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_trees_carry_the_distributions_of_plain_forwards(
    family: str, tree_config: TreeConfig, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every node with children: positions, BOS and windows are those of the text with the node's path."""
    monkeypatch.setattr("eagle_fsd.runtime.kv_cache.WIDEST", chunk)
    check_trees(other_model(family), tree_config)


@pytest.mark.parametrize("family", ["llama", "mistral"])
@torch.inference_mode()
def test_trees_carry_them_on_openvino(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A level sees its ancestors alone, which OpenVINO's attention over pages cannot do."""
    pytest.importorskip("openvino", reason="the extra openvino is not installed")
    from eagle_fsd.runtime.openvino.backend import OpenVINO

    model = tiny_model(family, seed=5)
    check_trees(TargetModel(model, runtime=OpenVINO("float32"), pages=False), TREE)
    monkeypatch.setenv("EAGLE_FSD_NO_OPERATORS", "1")
    check_trees(TargetModel(model, runtime=OpenVINO("float32"), pages=False), TREE)
    if family == "llama":
        with pytest.raises(ValueError, match="attend over pages, which knows no tree"):
            DraftModelSpec.for_target(TargetModel(model, runtime=OpenVINO("float32")), TARGET)


def check_trees(model: TargetModel, tree_config: TreeConfig) -> None:
    texts = prompts_of([13, 1, 6])
    tree = start(DraftModelSpec.for_target(model, TARGET), texts).draft(roots_of(texts), tree_config)
    for row, text in enumerate(texts):
        paths = paths_of(tree, row)
        assert len(set(paths)) == len(paths) == tree_config.total_tokens
        assert (int(plain_log_q(model, text).argmax()),) in paths
        for place, owner in enumerate(tree.owners[row].tolist()):
            if owner >= 0:
                wanted = plain_log_q(model, [*text, *paths[owner]])
                torch.testing.assert_close(tree.log_q[row, place], wanted, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("size", [VOCAB - 16, VOCAB + 9])
@torch.inference_mode()
def test_other_paddings_of_a_vocabulary_are_cut_before_the_softmax(size: int) -> None:
    model = other_model(vocab_size=size)
    spec, texts = DraftModelSpec.for_target(model, TARGET), prompts_of([7, 3], seed=1)
    few = min(size, VOCAB)
    texts = [[token % few for token in text] for text in texts]
    assert (spec.tokens, spec.some) == (few, few < VOCAB)
    tree = start(spec, texts).draft(roots_of(texts), TREE)
    assert tree.log_q.shape[-1] == few and int(tree.tokens.max()) < few
    torch.testing.assert_close(tree.log_q.exp().sum(-1), torch.ones(tree.log_q.shape[:2]))
    torch.testing.assert_close(tree.log_q[0, 0], plain_log_q(model, texts[0], few), atol=2e-3, rtol=2e-3)
    whole = tree.whole_log_q(VOCAB)
    assert whole.shape[-1] == VOCAB and bool((whole[..., few:] == -torch.inf).all())
    settler = Settler(TARGET, spec)
    settler.require_rule(Fuzzy(0.3, "js"))
    if few < VOCAB:
        with pytest.raises(ValueError, match="it is infinite where the draft has no probability"):
            settler.require_rule(Fuzzy(0.3, "forward_kl"))
    found = run_loop(TARGET, texts, spec.make(2, 8, TREE), 12, tree=TREE)
    assert found.texts == greedy_alone(TARGET.model, texts, 12)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
@torch.inference_mode()
def test_the_state_after_any_steps_is_that_of_a_fresh_drafter(family: str) -> None:
    """Whatever was drafted between; rows emit different numbers of tokens, and one row none."""
    spec = DraftModelSpec.for_target(other_model(family), TARGET)
    texts = prompts_of([5, 2, 1])
    drafter = start(spec, texts)
    for step in range(4):
        grown, again = drafter.draft(roots_of(texts), TREE), drafter.draft(roots_of(texts), TREE)
        assert torch.equal(grown.tokens, again.tokens) and torch.equal(grown.log_q, again.log_q)
        news = [prompts_of([1 + (step + row) % 4], seed=9 * step + row)[0] for row in range(3)]
        seen = show(news)
        done = step % 3 if step else None
        counts = [0 if row == done else len(new) for row, new in enumerate(news)]
        drafter.extend(replace(seen, counts=counts))
        texts = [[*text, *new[:count]] for text, new, count in zip(texts, news, counts, strict=True)]
        fresh = start(spec, texts)
        assert drafter.cache.row_lengths == fresh.cache.row_lengths == [len(text) for text in texts]
        require_same_state(drafter, fresh, [len(text) for text in texts], counts)
        drafter.root_states = fresh.root_states.clone()


def test_a_text_longer_than_the_drafts_positions_gets_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone and beside a shorter one, with learned positions, which must not be read out of range."""
    spec = DraftModelSpec.for_target(other_model("gpt2", n_positions=12), TARGET)
    prompts = prompts_of([10, 3, 14])
    wanted = greedy_alone(TARGET.model, prompts, 12)
    together = run_loop(TARGET, prompts, spec.make(3, 8, TREE), 12, tree=TREE)
    assert together.texts == wanted
    for row, prompt in enumerate(prompts):
        alone = run_loop(TARGET, [prompt], spec.make(1, 8, TREE), 12, tree=TREE)
        assert alone.texts == [wanted[row]]
        assert [len(step[0]) for step in alone.steps] == [len(s[row]) for s in together.steps if s[row]]
    drafter = start(spec, prompts)
    tree = drafter.draft(roots_of(prompts), TREE)
    assert [int((row >= 0).sum()) for row in tree.parents] == [9, 9, 0]
    drafter.select([2])
    monkeypatch.setattr(drafter.predictor, "log_q", None)  # its lm_head would be computed for nothing
    only = drafter.draft(torch.tensor([prompts[2][-1]]), TREE)
    assert only.tokens.tolist() == [[prompts[2][-1]]] and only.largest == tree.largest
    assert only.log_q.shape[:2] == (1, 0)


@torch.inference_mode()
def test_what_is_past_the_drafts_positions_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a shorter text is beside it, whether it grew so long or began so; and short texts may follow."""
    monkeypatch.setattr(kv_cache, "WIDEST", 4)
    model = other_model("gpt2", n_positions=12)
    spec, read, features = DraftModelSpec.for_target(model, TARGET), [], TargetModel.features

    def noting(self: TargetModel, tokens: Tensor, *rest: Any) -> Tensor:
        read.append(tokens.shape[1])
        return features(self, tokens, *rest)

    monkeypatch.setattr(TargetModel, "features", noting)
    long, grown, short = prompts_of([30, 11, 5])
    drafter = start(spec, [grown])
    assert read == [4, 4, 3]
    for count in (2, 3):  # the first of them goes over the last position
        drafter.extend(show(prompts_of([count])))
    assert read == [4, 4, 3, 2] and drafter.cache.row_lengths == [16]
    saved, other = drafter.save_row(0, 16), start(spec, [long])
    assert saved is not None and read[4:] == [4, 4, 4] and other.cache.row_lengths == [30]
    other.replace([0], start(spec, [short]))
    drafter.load_row(0, saved, grown[:9])
    drafter.read_on(show([short[:2]]))
    for one, text in ((other, short), (drafter, [*grown[:9], *short[:2]])):
        tree, fresh = (each.draft(roots_of([text]), TREE) for each in (one, start(spec, [text])))
        assert torch.equal(tree.tokens, fresh.tokens)
        torch.testing.assert_close(tree.log_q, fresh.log_q, atol=1e-4, rtol=1e-4)
    drafter.load_row(0, saved, [*grown, 1, 2, 3, 4])
    drafter.read_on(show([short]))
    assert drafter.draft(roots_of([short]), TREE).tokens.shape == (1, 1)


def test_a_prompt_longer_than_the_draft_reads_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """The text is plain greedy decoding's, and a prompt that it reads is not spoken of."""
    model = EagleFSD(TARGET, DraftModelSpec.for_target(other_model("gpt2", n_positions=12), TARGET))
    short, long = prompts_of([5, 14])
    model.generate([short], max_new_tokens=3, tree=TREE)
    assert not caplog.messages
    found = model.generate([long], max_new_tokens=3, tree=TREE)
    assert found.new_tokens == greedy_alone(TARGET.model, [long], 3)
    assert caplog.messages == [
        "prompt of 14 tokens: the draft model reads up to 12, so it drafts nothing behind it"
    ]


def test_flash_attention_never_reads_a_level_of_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """A level is no run of text; a prompt is."""
    floats = (torch.float32, torch.float16, torch.bfloat16)
    flash = FakeFlash(floats)
    monkeypatch.setitem(sys.modules, "flash_attn", flash)
    monkeypatch.setattr(checks, "flash_available", lambda device, dtype: True)
    draft = other_model()
    assert draft.flash
    text = prompts_of([6])
    with torch.inference_mode():
        flash.calls.clear()
        drafter = start(DraftModelSpec.for_target(draft, TARGET), text)
        assert flash.called == ["causal"] * 2
        tree = drafter.draft(roots_of(text), TREE)
        draft.flash = False
        wanted = start(DraftModelSpec.for_target(draft, TARGET), text).draft(roots_of(text), TREE)
    assert flash.called == ["causal"] * 2 and torch.equal(tree.tokens, wanted.tokens)
    torch.testing.assert_close(tree.log_q, wanted.log_q, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_a_tree_moves_to_another_device_as_a_whole() -> None:
    texts = prompts_of([5])
    spec = DraftModelSpec.for_target(other_model(vocab_size=VOCAB - 16), TARGET)
    tree = start(spec, texts).draft(roots_of(texts), TREE)
    there = moved(tree, torch.device("meta"))
    parts = [getattr(there, field.name) for field in fields(there)]
    assert {part.device.type for part in parts if isinstance(part, Tensor)} == {"meta"}
    assert (there.depth, there.most, there.log_q.shape) == (tree.depth, tree.most, tree.log_q.shape)


# --- in the loop ---


@pytest.mark.parametrize("family", FAMILIES)
def test_the_target_as_its_own_draft_model_accepts_every_token(family: str) -> None:
    """Chains of five: every greedy step emits six tokens."""
    target = TargetModel(tiny_model(family, FAMILIES[family]))
    model = EagleFSD(target, DraftModelSpec.for_target(target, target))
    prompts = prompts_of([6, 1, 13])
    wanted = greedy_alone(target.model, prompts, 24)
    for prompt, text in zip(prompts, wanted, strict=True):
        found = model.generate([prompt], max_new_tokens=24, tree=CHAIN)
        assert found.new_tokens == [text] and found.stats[0].steps == 4
    together = run_loop(target, prompts, model.drafter.make(3, 4, CHAIN), 24, tree=CHAIN)
    assert together.texts == wanted and len(together.steps) == 4


def test_recorded_steps_and_another_dtype_give_the_same_greedy_text(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = prompts_of([5, 8])
    wanted = greedy_alone(TARGET.model, prompts, 12)
    half = TargetModel(tiny_model(seed=5).to(torch.bfloat16))
    spec = DraftModelSpec.for_target(half, TARGET)
    assert run_loop(TARGET, prompts, spec.make(2, 8, TREE), 12, tree=TREE).texts == wanted
    for module in (kv_cache, tree_growth, sampling, tree_module):  # as on an accelerator
        monkeypatch.setattr(module, "host_can_read", lambda tensor: False)
    target = TargetModel(tiny_model(), Graphs(OpRecorder()))
    recorded = TargetModel(tiny_model(seed=5), target.stepper)
    spec = DraftModelSpec.for_target(recorded, target)
    assert run_loop(target, prompts, spec.make(2, 8, TREE), 12, tree=TREE).texts == wanted
    assert not caplog.records, "nothing was recorded"


def test_a_target_that_records_gets_whole_trees_whatever_its_draft_model_does() -> None:
    target, texts, tree = (
        TargetModel(tiny_model(), Graphs(OpRecorder())),
        prompts_of([5]),
        TreeConfig(9, 4, 3, 0.3),
    )
    few, whole = (
        start(DraftModelSpec.for_target(other_model(), one), texts).draft(roots_of(texts), tree)
        for one in (TARGET, target)
    )
    assert few.tokens.shape[1] < 9 == whole.tokens.shape[1]


# --- layers ---

# What writes to the residual stream, in the families of the test below.
RESIDUAL = ("o_proj.weight", "down_proj.weight", "down_proj", "c_proj.weight", "c_proj.bias")


@pytest.mark.parametrize(
    "family",
    ["llama", "mistral", "gemma3", "gpt2", "gemma2", "qwen2-window", "granite", "cohere", "qwen3_moe"],
)
def test_first_layers_share_weights_and_leave_the_target_as_it_was(family: str) -> None:
    target = TargetModel(tiny_model(family, FAMILIES.get(family, "sdpa")))
    before = target.model.config.to_dict()
    layers = first_layers(target.model, 1)
    assert target.model.config.to_dict() == before
    own = {weight.data_ptr() for weight in target.model.parameters()}
    mine = [weight.data_ptr() for weight in layers.parameters()]
    assert set(mine) < own
    prompts = prompts_of([6, 9])
    wanted = greedy_alone(target.model, prompts, 12)
    spec = DraftModelSpec.for_target(TargetModel(layers), target, "first-layers")
    assert run_loop(target, prompts, spec.make(2, 8, TREE), 12, tree=TREE).texts == wanted
    # Where the layers above add nothing, its logits are the target's.
    blank = tiny_model(family, FAMILIES.get(family, "sdpa"))
    with torch.no_grad():
        for name, weight in blank.named_parameters():
            if ("layers.1." in name or "h.1." in name) and name.endswith(RESIDUAL):
                weight.zero_()
        ids = torch.tensor([prompts[0]])
        torch.testing.assert_close(first_layers(blank, 1)(ids).logits, blank(ids).logits)
        assert not torch.allclose(layers(ids).logits, target.model(ids).logits, atol=0.1)


def test_layers_that_are_not_there_are_refused() -> None:
    for count in (2, 7):
        with pytest.raises(
            ValueError, match=f"draft_layers is {count}: the target has 2 layers.*ask for 1 to 1"
        ):
            first_layers(TARGET.model, count)
    with pytest.raises(ValueError, match="draft_layers is 0"):
        first_layers(TARGET.model, 0)


# --- identity ---


def test_the_identity_knows_weights_layers_and_vocabulary() -> None:
    models = [TARGET, other_model(), other_model(vocab_size=90), TargetModel(first_layers(TARGET.model, 1))]
    specs = [DraftModelSpec.for_target(model, TARGET) for model in models]
    assert len({spec.identity for spec in specs}) == 4
    again = DraftModelSpec.for_target(other_model(), TARGET)
    assert again.identity == specs[1].identity and specs[1] != again == replace(again)
    assert specs[3].network is models[3].model and specs[0].longest == 256
