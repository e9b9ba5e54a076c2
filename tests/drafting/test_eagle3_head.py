"""The EAGLE-3 network against the same network written straight down, and what its config may say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.eagle3 import VARIANTS, Eagle3Twin, eagle3_config, eagle3_head
from support.stubs import generator
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from eagle_fsd.drafting.eagle3.config import Eagle3Config, Reading, Structure, possible_readings
from eagle_fsd.drafting.eagle3.export import EAGLE, SPECULATORS, exported_config
from eagle_fsd.drafting.eagle3.head import Eagle3Head
from eagle_fsd.drafting.eagle3.rope import Rope
from eagle_fsd.runtime.grouped_attention import grouped_attention

WIDTH, LAYERS = 32, 36


def run_whole(head: Eagle3Head, states: Tensor, embeddings: Tensor, positions: Tensor) -> Tensor:
    """Run a head on one sequence [n, d], each position seeing those before it."""

    def attend(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        distance = positions[:, None] - positions
        window = head.config.windows[number] or len(positions) + 1000
        return grouped_attention(q, k, v, ((distance >= 0) & (distance < window))[None, None])

    return head(states[None], embeddings[None], positions[None], attend)[0]


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_a_forward_is_the_network_written_down(name: str) -> None:
    """Two steps: on true features, then on the states of the first step, which no `fc` may touch."""
    head = eagle3_head(1, **VARIANTS[name])
    twin, draw, positions = Eagle3Twin(head), generator(2), torch.arange(3, 10)
    features = torch.randn(7, head.config.fc_inputs, generator=draw)
    embeddings = torch.randn(7, head.config.hidden_size, generator=draw)
    found, wanted = head.project(features), twin.start(features)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    for _ in range(2):
        found = run_whole(head, found, embeddings, positions)
        wanted = twin.run(wanted, embeddings, positions.tolist())
        torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)
    if head.lm_head is not None:
        logits = head.lm_head(head.readout(found)) * head.config.logit_scale
        torch.testing.assert_close(logits, twin.logits(wanted), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"])
@torch.no_grad()
def test_every_flag_matters(name: str) -> None:
    """With a flag turned off the network is another one: the test above would fail without it."""
    head = eagle3_head(1, **VARIANTS[name])
    other = eagle3_head(1)
    other.load_state_dict(head.state_dict(), strict=False)
    draw, positions = generator(2), torch.arange(5)
    features = torch.randn(5, 3 * WIDTH, generator=draw)
    embeddings = torch.randn(5, WIDTH, generator=draw)
    first, second = (run_whole(one, one.project(features), embeddings, positions) for one in (head, other))
    assert (first - second).abs().max() > 1e-2


@torch.no_grad()
def test_only_a_shift_between_positions_matters() -> None:
    head, draw = eagle3_head(3), generator(0)
    states, embeddings = torch.randn(6, WIDTH, generator=draw), torch.randn(6, WIDTH, generator=draw)
    plain = run_whole(head, states, embeddings, torch.arange(6))
    shifted = run_whole(head, states, embeddings, torch.arange(6) + 100)
    torch.testing.assert_close(plain, shifted, atol=1e-3, rtol=1e-3)
    last_two = torch.arange(6) + torch.tensor([0, 0, 0, 0, 1, 1])
    assert (plain - run_whole(head, states, embeddings, last_two)).abs().max() > 1e-2


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    ],
)
def test_rotary_angles_are_those_of_transformers(fields: dict[str, Any]) -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=1, max_position_embeddings=2048)
    config.rope_parameters = {"rope_theta": 5e5, **fields}
    if fields["rope_type"] == "default":
        wanted = 5e5 ** -(torch.arange(0, 64, 2) / 64)
    else:
        wanted, _ = ROPE_INIT_FUNCTIONS[fields["rope_type"]](config, torch.device("cpu"))
    rope = Rope.from_dict({"rope_theta": 5e5, "rope_scaling": fields})
    assert rope == Rope.from_dict({"rope_parameters": {"rope_theta": 5e5, **fields}})
    torch.testing.assert_close(rope.inverse_frequencies(64), wanted)
    assert Rope.from_dict(dict.fromkeys(("rope_scaling", "rope_theta", "partial_rotary_factor"))) == Rope()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope scaling is 'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [1, 2]}}, "'mrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "names no factor"),
        ({"rope_scaling": "linear"}, "must be an object"),
        ({"partial_rotary_factor": 0.5}, "rotate whole heads"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "those of 'full_attention'"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "the rope's factor is 0"),
        ({"rope_scaling": {"type": "llama3", "factor": 2, "low_freq_factor": 0}}, "low_freq_factor is 0"),
        ({"rope_scaling": {"type": "llama3", "factor": 2, "high_freq_factor": "4"}}, "factor is '4'"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 2, "original_max_position_embeddings": 0}},
            "original_max_position_embeddings is 0",
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2, "high_freq_factor": 1.0}}, "high_freq_factor"),
    ],
)
def test_positions_that_are_not_built_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Rope.from_dict(fields)


# --- what a config may mean ---

IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("data", "taps"),
    [
        ({}, [(2, 18, 33)]),
        ({"eagle_config": {IDS: [1, 17, 32]}}, [(2, 18, 33), (1, 17, 32)]),
        ({"eagle_config": {IDS: [2, 18, 33]}}, [(2, 18, 33), (3, 19, 34)]),
        ({"eagle_config": {IDS: [24, 30, 36]}}, [(24, 30, 36)]),
        ({IDS: [2, 18, 33]}, [(2, 18, 33), (3, 19, 34)]),
        ({IDS: [1, 23, 36]}, [(1, 23, 36)]),
        ({IDS: [1, 17, 32]}, [(1, 17, 32), (2, 18, 33)]),
        ({IDS: [0, 17, 35]}, [(1, 18, 36)]),
        ({"eagle_config": None}, [(2, 18, 33)]),
        ({"eagle_config": [1, 17, 32]}, [(2, 18, 33)]),
    ],
)
def test_the_readings_of_taps(data: dict[str, Any], taps: list[tuple[int, ...]]) -> None:
    found = possible_readings(data, 3 * WIDTH, WIDTH, LAYERS)
    assert found == [Reading(one) for one in taps]
    assert possible_readings(data, 3 * WIDTH, WIDTH, LAYERS, taps=[4, 5, 6]) == [Reading((4, 5, 6))]


def test_heads_that_read_no_taps() -> None:
    data = {"eagle_config": {"use_aux_hidden_state": False}}
    assert possible_readings(data, WIDTH, WIDTH, LAYERS) == [Reading(())]
    assert possible_readings(data, None, WIDTH, LAYERS) == [Reading(())]
    with pytest.raises(ValueError, match=r"it has no fc\.weight"):
        possible_readings({}, None, WIDTH, LAYERS)


@pytest.mark.parametrize(
    ("data", "normed"),
    [
        ({}, [False]),
        ({"norm_output": None}, [False]),
        ({"norm_output": False}, [False]),
        ({"norm_output": True}, [True, False]),
        ({"norm_output": True, "speculators_model_type": "eagle3"}, [True]),
    ],
)
def test_the_readings_of_norm_output(data: dict[str, Any], normed: list[bool]) -> None:
    found = possible_readings(data, 3 * WIDTH, WIDTH, LAYERS)
    assert [reading.norm_output for reading in found] == normed
    assert [one.norm_output for one in possible_readings(data, 96, 32, 36, norm_output=True)] == [True]


@pytest.mark.parametrize(
    ("data", "options", "words"),
    [
        ({IDS: [2, 18]}, {}, r"taps are \[2, 18\]: by the width of its fc the head reads 3"),
        ({IDS: [2, 18, 37]}, {}, r"between 1 and the target's number of layers \(36\)"),
        ({IDS: "2"}, {}, "must be a list of integers"),
        ({}, {"taps": (0, 1, 2)}, "between 1 and"),
        ({}, {"fc_inputs": 4 * WIDTH}, "names no taps and the head reads 4"),
        ({}, {"fc_inputs": 100}, "must be a multiple of the target's hidden_size"),
        ({}, {"target_layers": 2}, "between 1 and the target's number of layers"),
    ],
)
def test_readings_that_cannot_be(data: dict[str, Any], options: dict[str, Any], words: str) -> None:
    arguments = {"fc_inputs": 3 * WIDTH, "target_size": WIDTH, "target_layers": LAYERS, **options}
    with pytest.raises(ValueError, match=words):
        possible_readings(data, **arguments)


LAYER = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 96}
FOUND = Structure(96, 40)


def test_a_config_of_speculators_nests_the_layer_and_has_other_defaults() -> None:
    window = {"layer_types": ["sliding_attention"], "sliding_window": 2048}
    nested = {"transformer_layer_config": LAYER | window, "speculators_model_type": "eagle3"}
    plain = Eagle3Config.from_dict(LAYER, FOUND, Reading((1, 2, 2)))
    other = Eagle3Config.from_dict(nested, FOUND, Reading((1, 2, 2)))
    assert (plain.norm_before_residual, plain.windows) == (False, (0,))
    assert (other.norm_before_residual, other.windows) == (True, (2048,))
    again = Eagle3Config.from_dict(nested | {"norm_before_residual": False}, FOUND, Reading((1, 2, 2)))
    assert not again.norm_before_residual
    assert plain.hidden_size == other.hidden_size == 32 and plain.draft_vocab_size == 40


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hidden_size": "32"}, "hidden_size is '32'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"intermediate_size": 0}, "intermediate_size is 0"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"logit_scale": -1}, "logit_scale is -1"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ({"trained_positions": 0}, "trained_positions is 0"),
        ({"sliding_window": -1, "use_sliding_window": True}, "sliding_window is -1"),
        ({"norm_before_fc": True, "fc_norm": True}, "both true"),
        ({"norm_before_residual": "yes"}, "norm_before_residual is 'yes'"),
        ({"target_hidden_size": 64}, "no embed_tokens: .* must bring its own"),
        ({"num_key_value_heads": 3}, "must divide"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"vocab_size": 39}, "draft_vocab_size is 40"),
        ({"layer_types": ["chunked"]}, "layer_types is 'chunked'"),
        ({"layer_types": []}, "must name each of the 1 layers"),
        ({"layer_types": ["sliding_attention"]}, "sliding_window is 0"),
        ({"transformer_layer_config": 3}, "must be an object"),
    ],
)
def test_configs_that_cannot_be(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Eagle3Config.from_dict(LAYER | fields, FOUND, Reading((1, 2, 2)))


def test_a_head_of_another_width_cannot_read_the_targets_lm_head() -> None:
    assert eagle3_config(hidden_size=24, embeddings=True).lm_head
    with pytest.raises(ValueError, match="24 wide, its target 32, and it has no lm_head"):
        eagle3_config(hidden_size=24, embeddings=True, lm_head=False)


@pytest.mark.parametrize(("normed", "kind"), [(False, "llama"), (True, "qwen3")])
def test_an_exported_layer_is_of_the_kind_that_its_norms_tell(normed: bool, kind: str) -> None:
    config = eagle3_config(qk_norm=normed)
    nested = exported_config(config, SPECULATORS, LAYERS)
    for fields in (exported_config(config, EAGLE, LAYERS), nested["transformer_layer_config"]):
        assert fields["model_type"] == kind
    found = replace(FOUND, qk_norm=normed)
    assert Eagle3Config.from_dict(nested, found, config.reading) == config


def test_a_config_without_a_size() -> None:
    for name in LAYER:
        with pytest.raises(ValueError, match=f"has no '{name}'"):
            Eagle3Config.from_dict({k: v for k, v in LAYER.items() if k != name}, FOUND, Reading((1, 2, 2)))
    assert eagle3_config().fc_inputs == 96
