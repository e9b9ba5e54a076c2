"""Taps are the residual stream of a plain forward: in prompts, over chunks, in trees, in every family."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from support.stubs import generator, random_parents
from support.tiny_models import FAMILIES, VOCAB, attention_of, prompts_of, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from eagle_fsd.core.padding import pad_right
from eagle_fsd.core.tree import DraftTree
from eagle_fsd.runtime.openvino.backend import OpenVINO
from eagle_fsd.target.admission import checks
from eagle_fsd.target.architecture import cache_argument, decoder_of
from eagle_fsd.target.graph_decoder import GraphDecoder
from eagle_fsd.target.model import TargetModel
from eagle_fsd.target.session import TargetSession
from eagle_fsd.target.taps import TappedDecoder, joined, plain_tapped_decoder

LAYERS = 4
TAPS = (1, 3, 4)


def deep_model(family: str = "llama", **options: object) -> PreTrainedModel:
    """Return a tiny model of LAYERS layers."""
    name = "n_layer" if family in ("gpt2", "gptj") else "num_hidden_layers"
    if "layer_types" in FAMILIES[family][2]:
        options["layer_types"] = FAMILIES[family][2]["layer_types"] * (LAYERS // 2)
    return tiny_model(family, attention_of(family), **{name: LAYERS, **options})


@torch.no_grad()
def plain_taps(model: PreTrainedModel, text: list[int], taps: tuple[int, ...] = TAPS) -> Tensor:
    """Return Hugging Face's hidden_states [n, taps * d] of a text; the last of them is normed."""
    hidden = model(torch.tensor([text]), output_hidden_states=True, use_cache=False).hidden_states
    return torch.cat([hidden[tap][0] for tap in taps], dim=-1)


@torch.no_grad()
def with_normed_end(model: PreTrainedModel, found: Tensor) -> Tensor:
    """Return taps [n, taps * d] with the last one normed by the model."""
    decoder = decoder_of(model)
    names = ("norm", "ln_f", "final_layer_norm", "final_layernorm")
    norm = next(getattr(decoder, name) for name in names if hasattr(decoder, name))
    *others, last = found.chunk(len(TAPS), dim=-1)
    return torch.cat([*others, norm(last)], dim=-1)


def tree_of(root: int, seed: int, nodes: int = 12, depth: int = 4) -> DraftTree:
    draw = generator(seed)
    parents = random_parents(nodes, depth, 3, draw)
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    tokens = torch.randint(VOCAB, (1, nodes), generator=draw)
    tokens[0, 0] = root
    return DraftTree(
        tokens=tokens,
        parents=torch.tensor([parents]),
        depths=torch.tensor([depths]),
        log_q=torch.empty(1, 0, VOCAB),
        owners=torch.empty(1, 0, dtype=torch.int64),
        depth=depth,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_taps_of_a_prompt_and_of_a_tree(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle_fsd.runtime.kv_cache.WIDEST", 4)
    model = deep_model(family)
    check_taps(model, TargetModel(model))


# Full attention, over pages; sliding windows with norms of q and k; soft-caps; learned positions.
SLOW = [pytest.param(family, marks=pytest.mark.slow) for family in ("gemma2", "gpt2")]


@pytest.mark.parametrize("family", ["llama", "gemma3", *SLOW])
def test_taps_of_a_prompt_and_of_a_tree_on_openvino(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle_fsd.runtime.kv_cache.WIDEST", 4)
    model = deep_model(family)
    check_taps(model, graph_target(model))


def graph_target(model: PreTrainedModel, weight_format: str = "float32") -> TargetModel:
    pytest.importorskip("openvino", reason="the extra openvino is not installed")
    return TargetModel(model, runtime=OpenVINO(weight_format))


@torch.no_grad()
def check_taps(model: PreTrainedModel, target: TargetModel) -> None:
    """Every node's taps are those of a plain forward over its own path; a prompt is read in chunks of 4."""
    target.admit_taps(TAPS)
    text = prompts_of([11])[0]
    session = TargetSession(target, 1, 64, TAPS)
    found = session.prefill(torch.tensor([text[:-1]]), [10])
    close = {"atol": 1e-3, "rtol": 1e-3}
    wanted = plain_taps(model, text)
    torch.testing.assert_close(with_normed_end(model, found[0]), wanted[:-1], **close)
    tree = tree_of(text[-1], seed=1)
    logits, features = session.verify(tree)
    parents = tree.parents[0].tolist()
    for node in range(len(parents)):
        path, at = [], node
        while at > 0:
            path, at = [int(tree.tokens[0, at]), *path], parents[at]
        wanted = plain_taps(model, text + path)[-1:]
        torch.testing.assert_close(with_normed_end(model, features[0, node : node + 1]), wanted, **close)
    untapped = TargetSession(target, 1, 64)
    untapped.prefill(torch.tensor([text[:-1]]), [10])
    assert torch.equal(untapped.verify(tree)[0], logits)


@torch.no_grad()
def test_graphs_show_the_taps_of_every_head_that_asked() -> None:
    """New taps join those that are shown, also while texts are under way; nothing is traced twice."""
    model, (text,) = deep_model(), prompts_of([9])
    target, plain = graph_target(model), TargetModel(model)
    before = target.weight_bytes
    session = TargetSession(target, 1, 64, (3, 1))
    target.admit_taps((3, 1))
    first, graphs = session.prefill(torch.tensor([text[:5]]), [5])[0], target.graphs
    target.admit_taps((1, 3))
    assert target.graphs is graphs and graphs.taps == (1, 3)
    target.admit_taps((2,))
    assert target.graphs.taps == (1, 2, 3) and target.weight_bytes == before
    second = session.prefill(torch.tensor([text[5:]]), [4])[0]
    wanted = TargetSession(plain, 1, 64, (3, 1)).prefill(torch.tensor([text]), [9])[0]
    torch.testing.assert_close(torch.cat((first, second)), wanted, atol=1e-4, rtol=1e-4)


def test_graphs_that_cannot_show_taps_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    target = graph_target(deep_model(seed=77))
    before = target.graphs
    with pytest.raises(ValueError, match=f"taps of this target are 1 to {LAYERS}"):
        target.admit_taps((1, LAYERS + 1))
    plain, trace = TappedDecoder.__call__, checks.trace_graphs

    def swapped(self: TappedDecoder, **inputs: object) -> tuple[object, list[Tensor]]:
        output, taps = plain(self, **inputs)
        return output, taps[::-1]

    def trace_wrongly(*arguments: object) -> GraphDecoder:
        with monkeypatch.context() as patch:
            patch.setattr(TappedDecoder, "__call__", swapped)
            return trace(*arguments)

    monkeypatch.setattr(checks, "trace_graphs", trace_wrongly)
    with pytest.raises(ValueError, match="differ from its plain forward's"):
        target.admit_taps((1, 2))
    assert target.graphs is before


def test_rounded_graphs_show_taps_too() -> None:
    target = graph_target(deep_model(), "int8")
    target.admit_taps(TAPS)
    assert target.graphs is not None and target.graphs.taps == TAPS


@torch.no_grad()
def test_taps_of_a_batch_are_those_of_its_rows() -> None:
    model = deep_model()
    target, prompts = TargetModel(model), prompts_of([3, 9, 1])
    found = TargetSession(target, 3, 32, (2, 2)).prefill(pad_right(prompts, 0), [3, 9, 1])
    for row, prompt in enumerate(prompts):
        wanted = plain_taps(model, prompt, (2, 2))
        torch.testing.assert_close(found[row, : len(prompt)], wanted, atol=1e-4, rtol=1e-4)
    nothing = torch.zeros(2, 0, dtype=torch.int64)
    assert TargetSession(target, 2, 8, TAPS).prefill(nothing, [0, 0]).shape == (2, 0, 96)


def test_the_model_is_not_changed_and_the_users_hooks_stay() -> None:
    model = deep_model()
    seen = []
    model.model.layers[1].register_forward_hook(lambda *_: seen.append(1))
    target = TargetModel(model)
    hooks = [len(module._forward_hooks) for module in model.modules()]
    seen.clear()
    with torch.no_grad():
        TargetSession(target, 1, 8, TAPS).prefill(torch.tensor([[1, 2]]), [2])
        assert seen == [1]
        TargetSession(target, 1, 8).prefill(torch.tensor([[1, 2]]), [2])
    assert hooks == [len(module._forward_hooks) for module in model.modules()]
    assert all(
        not module._forward_hooks for module in target._masked_decoder.layers if module is not None
    ) or (sum(len(module._forward_hooks) for module in target._masked_decoder.layers) == 1)


@torch.no_grad()
def test_layers_run_one_by_one_in_a_compiled_decoder_and_no_taps_stay_behind() -> None:
    model, text = deep_model(), prompts_of([7])[0]
    wanted = plain_taps(model, text, TAPS[:2])
    decoder = decoder_of(model)
    tapped = [decoder.layers[tap - 1] for tap in TAPS[:2]]
    for module in (decoder, *tapped):
        module._compiled_call_impl = lambda *_, **__: pytest.fail("compiled code calls no hooks")
    read = plain_tapped_decoder(decoder, LAYERS, TAPS[:2])
    _, found = read(input_ids=torch.tensor([text]), use_cache=False)
    torch.testing.assert_close(joined(found, torch.device("cpu"))[0], wanted, atol=1e-4, rtol=1e-4)
    first = weakref.ref(found[0])
    del found, _
    gc.collect()
    assert first() is None


def test_threads_do_not_see_each_others_taps() -> None:
    model = deep_model()
    target, texts = TargetModel(model), prompts_of([7] * 4)
    found: dict[int, Tensor] = {}

    @torch.no_grad()
    def work(number: int) -> None:
        for _ in range(5):
            found[number] = TargetSession(target, 1, 8, TAPS[:2]).prefill(torch.tensor([texts[number]]), [7])[
                0
            ]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, text in enumerate(texts):
        torch.testing.assert_close(found[number], plain_taps(model, text, TAPS[:2]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("taps", [(0,), (1, LAYERS + 1), (-1,)])
def test_taps_that_are_not_there(taps: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=f"taps of this target are 1 to {LAYERS}"):
        TargetModel(deep_model()).admit_taps(taps)


def test_taps_that_are_still_tested_are_not_yet_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that asks for taps while another one tests them tests them too."""
    target, tested = TargetModel(deep_model()), list[tuple[int, ...]]()
    taps_difference = checks.taps_difference

    def ask_again(target: TargetModel, taps: tuple[int, ...]) -> float:
        difference = taps_difference(target, taps)
        tested.append(taps)
        if len(tested) == 1:
            target.admit_taps(taps)
        return difference

    monkeypatch.setattr(checks, "taps_difference", ask_again)
    target.admit_taps(TAPS)
    target.admit_taps(TAPS)
    assert tested == [TAPS, TAPS]


def test_layers_whose_states_are_not_in_hidden_states_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that changes states between its layers, so that a tap is not what its trainer saw."""
    model = deep_model()
    layer = model.model.layers[2]
    plain, cache = type(layer).forward, cache_argument(type(layer))
    target = TargetModel(model)

    def shifted(self: torch.nn.Module, hidden: Tensor, *args: object, **kwargs: object) -> Tensor:
        out = plain(self, hidden, *args, **kwargs)
        return out + 5.0 if kwargs.get(cache) is not None else out

    monkeypatch.setattr(type(layer), "forward", shifted)
    with pytest.raises(ValueError, match="differ from its plain forward's"):
        target.admit_taps(TAPS)
    with pytest.raises(ValueError, match="differ from its plain forward's"):
        target.admit_taps(TAPS)
    monkeypatch.setattr(type(layer), "forward", plain)
    target.admit_taps(TAPS)
