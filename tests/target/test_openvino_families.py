"""Every architecture on the OpenVINO runtime against the torch path, and those that it refuses."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.tiny_models import FAMILIES, WINDOW, attention_of, prompts_of, tiny_head, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from eagle_fsd import EagleFSD, TreeConfig
from eagle_fsd.core.padding import pad_left
from eagle_fsd.runtime.openvino import library
from eagle_fsd.runtime.openvino.backend import OpenVINO
from eagle_fsd.runtime.openvino.block_cache import BlockCache, PagedCache, WrittenCache
from eagle_fsd.runtime.openvino.traced_attention import PagedAttention, TracedAttention, TreeAttention
from eagle_fsd.target.admission.checks import check_tree_verification
from eagle_fsd.target.hf_attention import is_known_code
from eagle_fsd.target.model import TargetModel

pytest.importorskip("openvino", reason="the extra openvino is not installed")

NEW_TOKENS = 20
LENGTHS = (3, 2 * WINDOW + 1, WINDOW + 2)
TREE = TreeConfig(8, 4, 2)
ALWAYS = ("llama", "qwen3", "gemma3", "gpt2", "granite")
RELEASE = tuple(map(int, transformers.__version__.split(".")[:2]))
# Family -> a part of the reason. gptj has an attention of its own up to transformers 5.23; experts are chosen
# in a way that the converter does not know.
REFUSED = {
    **({"gptj": "'gptj' model"} if RELEASE < (5, 24) else {}),
    **dict.fromkeys(("mixtral", "qwen3_moe", "gpt_oss"), "Model wasn't fully converted"),
    "deepseek_v3": "a layer attends to other keys than it stores",
    "llama4": "'llama4_text' model with chunked attention, which OpenVINO does not compute here",
}
SUPPORTED = [
    pytest.param(family, marks=() if family in ALWAYS else pytest.mark.slow)
    for family in FAMILIES
    if family not in REFUSED
]


@functools.lru_cache(maxsize=1)
def engines_of(family: str) -> list[EagleFSD]:
    """Return an engine on torch and one on OpenVINO, with the same weights, whose head texts outgrow."""
    head = tiny_head(trained_positions=2 * WINDOW)
    return [
        EagleFSD(TargetModel(tiny_model(family, attention_of(family)), runtime=runtime), head)
        for runtime in (None, OpenVINO("float32"))
    ]


@pytest.mark.parametrize("family", SUPPORTED)
def test_greedy_texts_equal_those_of_torch(family: str) -> None:
    ids, mask = pad_left(prompts_of(LENGTHS), pad=0)
    torch_engine, graph_engine = engines_of(family)
    assert torch_engine.target.runtime is None
    assert graph_engine.target.runtime is not None and graph_engine.target.weight_format == "float32"
    wanted, got = (
        engine.generate(ids, mask, max_new_tokens=NEW_TOKENS, tree=TREE) for engine in engines_of(family)
    )
    assert len({token for text in wanted.new_tokens for token in text}) > 6, (
        "a degenerate model proves nothing"
    )
    assert got.new_tokens == wanted.new_tokens
    # The head's graph drafts the same trees, so just as much of them is accepted.
    assert [one.tau for one in got.stats] == pytest.approx([one.tau for one in wanted.stats])


WITHOUT = {  # the operator
    "llama": PagedCache,
    "gpt2": PagedCache,
    "granite": PagedCache,
    "qwen2-window": BlockCache,
    "gemma3": BlockCache,
    "gemma2": BlockCache,
}


@pytest.mark.parametrize("family", WITHOUT)
def test_attention_is_in_place(family: str) -> None:
    """OpenVINO's pages have neither sliding windows nor soft-caps: models with either attend over blocks."""
    wanted = WITHOUT[family] if library.operator() is None else WrittenCache
    graphs = engines_of(family)[1].target.graphs
    assert graphs is not None and graphs.cache is wanted


ATTENTION = "eagle_fsd.runtime.openvino.traced_attention"


def refuse(*_inputs: object) -> None:
    raise RuntimeError("28 inputs were expected")


def without_operators(patch: pytest.MonkeyPatch) -> None:
    """Let there be no compiler."""
    patch.setattr(library, "operator", lambda: None)


def without_pages(patch: pytest.MonkeyPatch) -> None:
    """Let OpenVINO have no attention over pages either."""
    without_operators(patch)
    patch.setattr("eagle_fsd.target.graph_decoder.page_operator", lambda: None)


def failing_conversion(patch: pytest.MonkeyPatch) -> None:
    """Let our operator refuse its inputs."""
    patch.setattr(library, "node_factory", refuse)


def failing_pages(patch: pytest.MonkeyPatch) -> None:
    """Let OpenVINO's operator refuse its inputs, as that of another release may."""
    without_operators(patch)
    patch.setattr(f"{ATTENTION}.page_operator", lambda: refuse)


def wrong_scale(patch: pytest.MonkeyPatch, kinds: Sequence[type[TracedAttention]] = (TreeAttention,)) -> None:
    """Let an attention compute something else."""
    for kind in kinds:
        attend = kind.attend

        def scaled(self: Any, layer: int, q: Tensor, *rest: Any, attend: Any = attend) -> Tensor:
            return attend(self, layer, 3 * q, *rest)

        patch.setattr(kind, "attend", scaled)


def wrong_pages(patch: pytest.MonkeyPatch) -> None:
    without_operators(patch)
    wrong_scale(patch, (PagedAttention,))


@pytest.mark.parametrize(
    "trouble",
    [without_operators, without_pages, failing_conversion, failing_pages, wrong_scale, wrong_pages],
)
def test_others_serve_where_an_operator_does_not(
    trouble: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE_FSD_NO_WEIGHTS_CACHE", "1")
    ids, mask = pad_left(prompts_of(LENGTHS), pad=0)
    with monkeypatch.context() as patch:
        trouble(patch)
        target = TargetModel(tiny_model("llama"), runtime=OpenVINO("float32"))
    assert target.graphs is not None
    assert target.graphs.cache is (PagedCache if trouble is without_operators else BlockCache)
    assert target.weight_bytes == pytest.approx(engines_of("llama")[1].target.weight_bytes, rel=0.02)
    wanted, got = (
        engine.generate(ids, mask, max_new_tokens=NEW_TOKENS, tree=TREE).new_tokens
        for engine in (engines_of("llama")[0], EagleFSD(target, tiny_head()))
    )
    assert got == wanted


@pytest.mark.parametrize(
    "family",
    [pytest.param(one, marks=() if one in ("gptj", "mixtral") else pytest.mark.slow) for one in REFUSED],
)
def test_what_cannot_be_converted_is_refused(family: str) -> None:
    root = logging.getLogger()
    before = root.level, root.filters[:], root.handlers[:]
    with pytest.raises(ValueError, match="use runtime torch") as error:
        TargetModel(tiny_model(family, attention_of(family)), runtime=OpenVINO("float32"))
    assert REFUSED[family] in str(error.value)
    assert "\n" not in str(error.value)
    # The converter raises the root logger's level and adds a filter, and leaves both where it fails.
    assert (root.level, root.filters, root.handlers) == before


def test_a_graph_that_is_wrong_in_a_window_is_refused_for_its_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether the model has the window of its config was found out before there were graphs."""
    monkeypatch.setenv("EAGLE_FSD_NO_WEIGHTS_CACHE", "1")
    wrong_scale(monkeypatch, (TracedAttention, TreeAttention))
    with pytest.raises(ValueError, match="'mistral' model whose tree verification differs"):
        TargetModel(tiny_model("mistral"), runtime=OpenVINO("float32"))


def test_sampled_texts_of_one_seed_equal_those_of_torch() -> None:
    """Logits differ in their last bits only, which no draw of these notices."""
    ids, mask = pad_left(prompts_of(LENGTHS, seed=1), pad=0)
    for seed in range(4):
        texts = [
            engine.generate(
                ids, mask, max_new_tokens=NEW_TOKENS, tree=TREE, temperature=0.9, seed=seed
            ).new_tokens
            for engine in engines_of("llama")
        ]
        assert texts[0] == texts[1]


def test_a_kept_graph_is_tested_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph of other weights, or of another machine, is new. The torch path is not run and not tested."""
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path))
    monkeypatch.delenv("EAGLE_FSD_NO_WEIGHTS_CACHE", raising=False)
    tested: list[bool] = []

    def check(target: TargetModel) -> None:
        tested.append(target.graphs is not None)
        check_tree_verification(target)

    def load(model: PreTrainedModel) -> list[bool]:
        tested.clear()
        TargetModel(model, runtime=OpenVINO("float32"))
        return list(tested)

    for module in ("admission.checks", "model"):
        monkeypatch.setattr(f"eagle_fsd.target.{module}.check_tree_verification", check)
    model = tiny_model("llama")
    assert load(model) == [True] and load(model) == []
    [record] = tmp_path.rglob("admitted.json")
    record.write_text('{"eagle_fsd": "0.0.1", "processor": "another"}')
    assert load(model) == [True] and load(model) == []
    with torch.no_grad():
        model.get_input_embeddings().weight[0, 0] += 1
    assert load(model) == [True]
    # Whether a sliding window is real is found out on torch.
    assert load(tiny_model("gemma3")) == [False, True]


def test_graphs_are_kept_only_where_weights_and_config_say_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hook or somebody's own layer computes another model with the same weights."""
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path))
    monkeypatch.delenv("EAGLE_FSD_NO_WEIGHTS_CACHE", raising=False)

    def texts(model: PreTrainedModel) -> list[list[int]]:
        targets = (TargetModel(model), TargetModel(model, runtime=OpenVINO("float32")))
        engines = [EagleFSD(one, tiny_head()) for one in targets]
        options: dict[str, Any] = {"max_new_tokens": 12, "tree": TREE}
        return [one.generate(prompts_of([7]), **options).new_tokens[0] for one in engines]

    class Own(type(tiny_model().model.norm)):
        pass

    hooked, own, patched, plain = (tiny_model() for _ in range(4))
    hooked.model.layers[0].mlp.register_forward_hook(lambda module, given, made: -made)
    own.model.norm.__class__ = Own
    patched.model.norm.forward = lambda x: -x
    assert [is_known_code(one.model) for one in (hooked, own, patched, plain)] == [False, False, False, True]
    made = [texts(one) for one in (plain, hooked, plain)]
    assert all(torch_text == its for torch_text, its in made)
    assert made[0] == made[2] != made[1]
    assert len(list((tmp_path / "graphs").glob("decoder-*"))) == 1


def test_memory_counts_the_weights_of_the_graphs() -> None:
    """Of torch's target every weight; of OpenVINO's the graphs', and the embeddings that torch looks up."""
    torch_engine, graph_engine = engines_of("llama")
    (plain,), (graphs,) = torch_engine.memory(), graph_engine.memory()
    weights = sum(weight.nbytes for weight in tiny_model("llama").parameters())
    assert plain["weight_bytes"] == weights
    # Beside the weights a graph has some numbers of its own, such as the rotary frequencies.
    assert weights <= graphs["weight_bytes"] < 1.1 * weights
    target = graph_engine.target
    embeddings = target.held.get_input_embeddings().weight.nbytes
    assert graphs["weight_bytes"] == target.weight_bytes + embeddings
    assert graphs["head_bytes"] == plain["head_bytes"] > 0
