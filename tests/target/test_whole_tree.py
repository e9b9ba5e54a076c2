"""Recurrent layers that run a whole tree at once, against the layers of transformers on each path alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import transformers
from support.stubs import generator, random_tree
from support.tiny_models import HIDDEN, RECURRENT, VOCAB, attention_of, prompts_of, tiny_model
from torch import Tensor, nn

from eagle_fsd.core.padding import pad_right
from eagle_fsd.core.tree import DraftTree
from eagle_fsd.target.hf_attention import with_grouped_attention
from eagle_fsd.target.model import TargetModel
from eagle_fsd.target.session import TargetSession
from eagle_fsd.target.states.mixers import Mixer, find_mixers
from eagle_fsd.target.states.state_cache import StateCache

pytestmark = pytest.mark.skipif(
    not hasattr(transformers.Cache, "get_conv_state"), reason="transformers is older than 5.22"
)
LEVEL_BY_LEVEL = ("jamba",)  # whose Mamba-1 mixes tokens in a loop of its own
ALWAYS = ("qwen3_5", "lfm2", "falcon_h1", "jamba")
every_family = pytest.mark.parametrize(
    "family", [pytest.param(one, marks=() if one in ALWAYS else pytest.mark.slow) for one in RECURRENT]
)


def paths_of(tree: DraftTree) -> Iterator[tuple[int, list[int]]]:
    """Yield every node's row and the path to it."""
    for row, parents in enumerate(tree.parents.tolist()):
        for node in range(len(parents)):
            path = [node]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            yield row, path


def tensor_of(made: Tensor | tuple[Tensor, ...]) -> Tensor:
    return made if isinstance(made, Tensor) else made[0]


def mixers_of(family: str) -> tuple[nn.Module, nn.Module]:
    """Return the last recurrent layer of a model, and that of the copy that trees are run with."""
    model = tiny_model(family, attention_of(family))
    return find_mixers(model.get_decoder())[-1], find_mixers(with_grouped_attention(model.get_decoder()))[-1]


@pytest.mark.covering(1)
@torch.inference_mode()
@every_family
@pytest.mark.parametrize("seed", range(2))
def test_every_node_has_the_output_of_its_path_alone(family: str, seed: int) -> None:
    """Behind texts of several lengths, two of them new, on three trees in turn; texts go on from nodes."""
    plain, ours = mixers_of(family)
    draw = generator(seed)
    lengths = [0, *torch.randint(1, 12, (3,), generator=draw).tolist(), 0]
    texts = [torch.randn(length, HIDDEN, generator=draw) for length in lengths]
    cache = StateCache(len(texts), 64, torch.device("cpu"))
    cache.expect_prompt(lengths, 0, max(lengths))
    ours(nn.utils.rnn.pad_sequence(texts, batch_first=True), cache)
    cache.advance(lengths)
    for step, nodes in enumerate((1, 6, 20)):  # no deeper than a kernel's inputs, and deeper
        tree = random_tree(len(texts), nodes, 7, 3, VOCAB, seed=3 * seed + step)
        inputs = torch.randn(*tree.tokens.shape, HIDDEN, generator=draw)
        cache.expect_tree(tree.parents, tree.depths)
        slots = cache.place(nodes)
        made = tensor_of(ours(inputs, cache))
        chosen = torch.randint(nodes, (len(texts),), generator=draw).tolist()
        kept = []
        for row, path in paths_of(tree):
            alone = tensor_of(plain(torch.cat((texts[row], inputs[row, path]))[None]))[0, -1]
            off = (made[row, path[-1]] - alone).norm() / alone.norm()
            assert off < 1e-4
            if path[-1] == chosen[row]:
                kept.append(path)
        cache.compact(pad_right(kept, -1), slots)
        cache.advance([len(path) for path in kept])
        texts = [torch.cat((text, inputs[row, kept[row]])) for row, text in enumerate(texts)]


@torch.inference_mode()
@every_family
def test_one_call_and_one_reading_of_the_weights_are_enough_for_a_tree(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = TargetModel(tiny_model(family, attention_of(family)))
    session = TargetSession(target, 2, 64)
    session.prefill(pad_right(prompts_of((4, 11)), 0), [4, 11])
    mixer, read, calls, call = find_mixers(target.decoder)[0], list[str](), list[object](), Mixer._call
    linears = [name for name, child in mixer.named_children() if isinstance(child, nn.Linear)]
    for name in linears:
        mixer.get_submodule(name).register_forward_hook(lambda *_, name=name: read.append(name))
    monkeypatch.setattr(Mixer, "_call", lambda self, *args: calls.append(self.facts) or call(self, *args))
    tree = random_tree(2, 10, 4, 3, VOCAB, seed=1)
    session.verify(tree)
    by_levels = family in LEVEL_BY_LEVEL
    assert calls.count(calls[0]) == (1 + int(tree.depths.max()) if by_levels else 1)
    once = ["in_proj", "out_proj"] if by_levels else linears  # the others read what a level has made
    assert len(once) > 1 and sorted(name for name in read if name in once) == sorted(once)


@torch.inference_mode()
def test_a_layer_that_accelerate_has_hooked_runs_level_by_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its forward is called as it is."""
    hooks = pytest.importorskip("accelerate.hooks")
    tree = random_tree(2, 10, 4, 3, VOCAB, seed=1)

    def verify(hooked: bool) -> Tensor:
        model = tiny_model("qwen3_5")
        if hooked:
            for mixer in find_mixers(model.get_decoder()):
                hooks.add_hook_to_module(mixer.conv1d, hooks.ModelHook())
        session = TargetSession(TargetModel(model), 2, 64)
        session.prefill(pad_right(prompts_of((4, 11)), 0), [4, 11])
        logits, _ = session.verify(tree)
        return logits

    wanted = verify(False)
    calls, level = [], Mixer.level
    monkeypatch.setattr(Mixer, "level", lambda self, *args: calls.append(1) or level(self, *args))
    torch.testing.assert_close(verify(True), wanted, rtol=1e-3, atol=1e-3)
    assert len(calls) > int(tree.depths.max())
