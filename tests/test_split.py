"""Targets that are split among ranks: two processes on the CPU say what one says, greedy and sampled."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from eagle_fsd import EagleFSD
from eagle_fsd.acceptance.accept import Verdict
from eagle_fsd.decoding.on_ranks.agreement import pack, unpack
from eagle_fsd.hub.head_checkpoint import save_head
from eagle_fsd.hub.split.plan import check_split, require_splittable, require_weights_of_its_own
from support.eagle3 import eagle3_head, save_eagle3
from support.split_run import TREE, environment, free_port, on_two_ranks, run_job
from support.tiny_models import FAMILIES, tiny_head, tiny_model
from support.tiny_tokenizer import tiny_tokenizer

Jobs = list[tuple[str, dict[str, Any]]]


def saved(folder: Path, family: str = "llama") -> str:
    """Save a tiny target and return its folder."""
    model = tiny_model(family)
    model.config._attn_implementation = None  # it is not part of a checkpoint
    model.save_pretrained(folder / family)
    return str(folder / family)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("split")
    save_head(tiny_head(), root / "head")
    return root


@pytest.fixture(scope="module")
def quick(folder: Path) -> tuple[Jobs, list[list[Any]]]:
    """Three targets, each with another way to draft, and what two ranks made of them."""
    head = {"ea_model": str(folder / "head")}
    llama, qwen3, experts = (saved(folder, family) for family in ("llama", "qwen3", "qwen3_moe"))
    jobs: Jobs = [
        ("answers", {"base_model": llama, **head}),
        ("answers", {"base_model": qwen3, **head, "lookup": True}),
        ("answers", {"base_model": experts, "draft_layers": 1}),
        ("memory", {"base_model": llama, **head}),
        ("drawn", {"base_model": llama, **head}),
        ("stray", {"base_model": llama, **head}),
        ("refused", {"base_model": llama, **head, "device_map": "auto"}),
        ("refused", {"base_model": llama, "ea_model": str(folder / "missing")}),
    ]
    return jobs, on_two_ranks(folder, jobs)


@pytest.mark.parametrize("number", range(3), ids=["llama", "qwen3", "experts"])
def test_two_ranks_say_what_one_process_says(quick: tuple[Jobs, list[list[Any]]], number: int) -> None:
    jobs, found = quick
    expected = run_job(*jobs[number])
    assert expected["greedy"] != expected["sampled"]
    assert found[0][number] == found[1][number] == expected


def test_each_rank_holds_half_of_what_is_split(quick: tuple[Jobs, list[list[Any]]]) -> None:
    jobs, found = quick
    (whole,) = run_job(*jobs[3])
    assert found[0][3] == found[1][3]
    norms = sum(p.nbytes for name, p in tiny_model("llama").named_parameters() if "norm" in name)
    for rank, held in enumerate(found[0][3]):
        assert held["rank"] == rank
        assert held["weight_bytes"] == (whole["weight_bytes"] - norms) // 2 + norms
        assert held["cache_bytes"] == whole["cache_bytes"] // 2
        assert held["head_bytes"] == whole["head_bytes"] > 0


def test_ranks_draw_the_same_seeds(quick: tuple[Jobs, list[list[Any]]]) -> None:
    jobs, found = quick
    assert found[0][4] == found[1][4]
    (one, seed), (other, _) = found[0][4]
    assert one != other
    model = EagleFSD.from_pretrained(**jobs[4][1], dtype="float32", pack=False, runtime="torch")
    again = model.generate([[5, 6, 7]], tree=TREE, temperature=1, max_new_tokens=12, seed=seed)
    assert again.new_tokens == one


def test_ranks_that_are_given_different_work_say_so(quick: tuple[Jobs, list[list[Any]]]) -> None:
    _, found = quick
    for rank in range(2):
        for said, place in zip(
            found[rank][5], ["generate", ["generate", "a decoding step"][rank]], strict=True
        ):
            assert f"rank 1 is not where rank 0 is ({place} on rank {rank}): every rank must make" in said


def test_every_rank_refuses_what_one_cannot_load(quick: tuple[Jobs, list[list[Any]]]) -> None:
    _, found = quick
    for rank in range(2):
        assert "device_map is 'auto' with tp_plan" in found[rank][6]
        assert "missing" in found[rank][7]
    assert found[0][7] == found[1][7]


# -- what one process can tell ----------------------------------------


def test_a_single_process_names_the_command(folder: Path) -> None:
    with pytest.raises(
        ValueError, match=r"in a single process.*run torchrun --nproc-per-node N -m eagle_fsd"
    ):
        EagleFSD.from_pretrained(saved(folder), ea_model=str(folder / "head"), tp_plan="auto")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"tp_plan": "mine"}, "tp_plan is 'mine': it must be one of auto"),
        ({"runtime": "openvino"}, "runtime is 'openvino' with tp_plan: .*use runtime torch"),
        ({"weight_format": "int8"}, "weight_format is 'int8' with tp_plan"),
        ({"device_map": "auto"}, "device_map is 'auto' with tp_plan: .*leave one out"),
        ({"draft_device": "cpu"}, "draft_device is 'cpu' with tp_plan"),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(asked: dict[str, Any], message: str) -> None:
    usual = {"tp_plan": "auto", "runtime": "auto", "weight_format": None, "device_map": None}
    with pytest.raises(ValueError, match=message):
        require_splittable(**{**usual, "draft_device": None, **asked})


def test_heads_must_be_shared_evenly() -> None:
    config = transformers.LlamaConfig(**FAMILIES["llama"][2])
    check_split(config, 2, "it")
    with pytest.raises(ValueError, match=r"has num_key_value_heads 2: the 4 ranks must .*; start 2"):
        check_split(config, 4, "it")
    with pytest.raises(ValueError, match=r"has num_attention_heads 4: the 3 ranks must .*; start 2"):
        check_split(config, 3, "it")
    check_split(transformers.Phi3Config(**FAMILIES["phi3"][2]), 4, "it")  # whose heads stay whole
    with pytest.raises(ValueError, match="'gpt2' model: transformers has no tensor parallel plan"):
        check_split(transformers.GPT2Config(**FAMILIES["gpt2"][2]), 2, "it")
    with pytest.raises(ValueError, match=r"is a \.gguf file with tp_plan"):
        require_weights_of_its_own("it", "it.gguf")


def test_a_verdict_is_packed_and_unpacked() -> None:
    draw = torch.Generator().manual_seed(0)
    wide = [torch.randint(-1, 50, (3, 5), generator=draw) for _ in range(4)]
    single = [torch.randint(0, 5, (3,), generator=draw) for _ in range(3)]
    verdict = Verdict(
        wide[0], single[0], wide[1], single[1], wide[2] > 20, wide[3] > 20, single[2] > 1, torch.zeros(3, 2)
    )
    found = unpack(pack(verdict), 5)
    for name in ("path", "length", "tokens", "next_token", "fuzzy", "asked", "finite"):
        assert getattr(found, name).equal(getattr(verdict, name)), name
    assert found.chances is None
