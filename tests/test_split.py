"""Targets that are split among ranks: two processes on the CPU say what one says, greedy and sampled."""

from __future__ import annotations

import contextlib
import http.client
import json
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.eagle3 import eagle3_head, save_eagle3
from support.split_run import MINE, TREE, environment, on_two_ranks, run_job, two_places
from support.tiny_models import FAMILIES, prompts_of, tiny_head, tiny_model
from support.tiny_tokenizer import tiny_tokenizer

from eagle_fsd import EagleFSD, chat, generate, serve
from eagle_fsd.acceptance.accept import Verdict
from eagle_fsd.cli.ranks import show_memory
from eagle_fsd.core.config import TreeConfig
from eagle_fsd.decoding.on_ranks.agreement import pack, unpack
from eagle_fsd.decoding.on_ranks.following import FAREWELL, Leader, follow
from eagle_fsd.decoding.request import Stopper, Terms, Text
from eagle_fsd.decoding.scheduler import Scheduler
from eagle_fsd.hub.head_checkpoint import save_head
from eagle_fsd.hub.split.plan import check_split, require_splittable, require_weights_of_its_own
from eagle_fsd.runtime.ranks import Ranks
from eagle_fsd.target.model import TargetModel

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
        ("refused", {"base_model": llama, "ea_model": MINE}),
    ]
    save_head(tiny_head(), folder / "0")  # there is none for rank 1
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
    sizes = {name: weight.nbytes for name, weight in tiny_model("llama").named_parameters()}
    norms = sum(size for name, size in sizes.items() if "norm" in name)
    half = (whole["weight_bytes"] - norms) // 2 + norms
    if "model.embed_tokens" not in tiny_model("llama").tp_plan:  # as in earlier releases of transformers
        half += sizes["model.embed_tokens.weight"] // 2
    for rank, held in enumerate(found[0][3]):
        assert held["rank"] == rank
        assert held["weight_bytes"] == half
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
        places = ["generate", "reading prompts", ["generate", "a decoding step"][rank]]
        for said, place in zip(found[rank][5], places, strict=True):
            assert f"rank 1 is not where rank 0 is ({place} on rank {rank}): every rank must make" in said


def test_every_rank_refuses_what_one_cannot_load(quick: tuple[Jobs, list[list[Any]]]) -> None:
    _, found = quick
    for rank in range(2):
        assert "device_map is 'auto' with tp_plan" in found[rank][6]
        assert "missing" in found[rank][7]
    assert found[0][7] == found[1][7]
    assert found[0][8] == found[1][8] and found[0][8].startswith("rank 1: draft head '1'")


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
        wide[0], single[0], wide[1], single[1], wide[2] > 20, wide[3] > 20, single[2], torch.zeros(3, 2)
    )
    found = unpack(pack(verdict), 5)
    for name in ("path", "length", "tokens", "next_token", "fuzzy", "asked", "sound"):
        assert getattr(found, name).equal(getattr(verdict, name)), name
    assert found.chances is None


def test_rank_0_tells_what_its_scheduler_is_told() -> None:
    """Two schedulers that are told the same are at the same place, whatever comes and goes."""
    target = TargetModel(tiny_model("llama"))
    channel: list[Any] = []
    told, made = Leader(FakeRanks(0, 2, channel=channel)), list[Scheduler]()

    def new_scheduler() -> Scheduler:
        made.append(Scheduler(target, None, TreeConfig(1), rows=2, slice_tokens=16, prefix_tokens=4096))
        return made[-1]

    mine = new_scheduler()
    texts = [Text(n, 5, Terms(()), prompt=prompt) for n, prompt in enumerate(prompts_of([40, 36, 44, 50]))]
    ends = {3: 2}  # by text, the tokens after which it stops
    for text in texts:
        text.stopper = stop_after(ends.get(text.number))
        mine.admit(text)
        told.admit(text, ends.get(text.number))
    for step in range(40):
        if step == 9:
            mine.retire(texts[2])
            told.retire(texts[2])
        told.step()
        mine.step()
    told.stop()
    follow(FakeRanks(1, 2, channel=channel), new_scheduler, stop_after)
    assert all(text.done for text in texts) and texts[2].stats.finish_reason == "cancelled"
    assert texts[3].stats.finish_reason == "stop" and len(texts[3].new_tokens) == 2
    kept = [[text.tokens.tolist() for text in scheduler.prefixes.texts] for scheduler in made]
    assert kept[0] == kept[1] and len(kept[0]) == 3
    assert not made[1].busy and not channel


def stop_after(count: int | None) -> Stopper | None:
    """Return what ends a text after so many steps of one token each."""
    if count is None:
        return None
    left = iter(range(count - 1, -1, -1))
    return lambda tokens: len(tokens) if next(left) == 0 else None


@dataclass(frozen=True)
class FakeRanks(Ranks):
    """Ranks whose messages wait in a list, for the other one to take in the same process."""

    channel: list[Any] = field(default_factory=list)

    def lead(self, value: Any) -> Any:
        if self.leads:
            self.channel.append(pickle.loads(pickle.dumps(value)))
            return value
        return self.channel.pop(0)


# -- programs ----------------------------------------

FLAGS = ("--draft-layers", "1", "--dtype", "float32", "--max-new-tokens", "20")
SIZES = ("--total-tokens", "12", "--depth", "4", "--tree-top-k", "3")
PLAIN = ("--no-pack", "--runtime", "torch")


@pytest.fixture(scope="module")
def chatty(folder: Path) -> str:
    """A tiny target with a tokenizer."""
    path = saved(folder / "chatty")
    tiny_tokenizer().save_pretrained(path)
    return path


def command(module: str, target: str, *flags: str, split: bool) -> list[str]:
    """Return the command of a program, under torchrun if its target is split."""
    start = ["-m", f"eagle_fsd.{module}", *PLAIN]
    if split:
        agent = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        start = [*agent, "-m", f"eagle_fsd.{module}", "--tp-plan", "auto"]
    return [sys.executable, *start, "--base-model", target, *FLAGS, *SIZES, *flags]


def run(*words: str, split: bool, text: str | None = None) -> subprocess.CompletedProcess[str]:
    module, target, *flags = words
    return subprocess.run(
        command(module, target, *flags, split=split),
        **{"input": text, "capture_output": True, "text": True, "timeout": 300, "env": environment()},
    )


@pytest.mark.slow
def test_the_command_line_under_torchrun_says_what_one_process_says(chatty: str) -> None:
    asked = ("generate", chatty, "-", "--json", "--temperature", "0.8", "--seed", "3")
    one = run(*asked, split=False, text="hello there")
    two = run(*asked, split=True, text="hello there")  # stdin is read by rank 0 alone
    assert (one.returncode, two.returncode) == (0, 0), one.stderr + two.stderr
    (line,) = two.stdout.splitlines()
    expected, found = json.loads(one.stdout), json.loads(line)
    for key in ("text", "token_ids", "steps", "tau", "seed", "tree", "finish_reason", "accept_histogram"):
        assert found[key] == expected[key], key
    assert "ranks" not in expected and [held["rank"] for held in found["ranks"]] == [0, 1]
    assert two.stderr.count("tokens in") == 1


@pytest.mark.slow
def test_a_mistake_under_torchrun_is_one_line_of_rank_0(chatty: str, folder: Path) -> None:
    broken = Path(saved(folder / "broken"))
    (broken / "model.safetensors").unlink()
    cases = [
        (("generate", chatty, "--prompt", " "), "prompt 1 of the command line is empty"),
        (
            ("generate", chatty, "--prompt", "x", "--runtime", "openvino"),
            "runtime is 'openvino' with tp_plan",
        ),
        (("generate", chatty, "--prompt", "x", "--depth", "no"), "argument --depth"),
        (("generate", str(broken), "--prompt", "x"), "error: target"),
    ]
    for words, message in cases:
        found = run(*words, split=True)
        lines = [line for line in found.stderr.splitlines() if "error: " in line and "eagle_fsd" in line]
        assert len(lines) == 1 and message in lines[0], found.stderr
        assert "exitcode  : 2" in found.stderr and found.returncode == 1, found.stderr
        assert not found.stdout


def test_a_program_without_torchrun_names_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    for main, module in ((generate.main, "generate"), (serve.main, "serve"), (chat.main, "serve")):
        prompt = ["--prompt", "x"] if main is generate.main else []
        assert main(["--tp-plan", "auto", *prompt]) == 2
        said = capsys.readouterr().err
        assert f"torchrun --nproc-per-node N -m eagle_fsd.{module} --tp-plan auto" in said
        assert said.count("\n") == 1


def test_memory_is_shown_in_a_line_for_each_rank() -> None:
    held = [
        {"rank": rank, "weight_bytes": 2_500_000, "head_bytes": rank, "cache_bytes": 10**9}
        for rank in range(2)
    ]
    shown = "2.50 MB of weights, 0.00 MB of head, 1000.00 MB of keys and values"
    assert show_memory(held).splitlines() == [f"rank 0: {shown}", f"rank 1: {shown}"]


REQUESTS: list[dict[str, Any]] = [
    {"prompt": "hello", "max_tokens": 25, "temperature": 0},
    {"prompt": "hello you", "max_tokens": 12, "temperature": 0.9, "seed": 1, "n": 2},
    {"prompt": "good day to you all", "max_tokens": 30, "temperature": 0.7, "seed": 2, "threshold": 0.4},
    {"prompt": "hello", "max_tokens": 30, "temperature": 0.9, "seed": 3, "stop": ["a", "e", "o", "%"]},
    {"prompt": "x", "max_tokens": 20, "temperature": 1, "seed": 4, "repetition_penalty": 1.5},
    {"prompt": "yes", "max_tokens": 20, "temperature": 0, "logprobs": 2, "logit_bias": {"5": 20}},
]


def served(target: str, split: bool) -> list[Any]:
    """Return what a server answers to REQUESTS, sent at once, while other clients leave early."""
    flags = ("--port", "0", "--max-rows", "3", "--min-confidence", "0.05")  # levels depend on the draft
    process = subprocess.Popen(
        command("serve", target, *flags, split=split), stderr=subprocess.PIPE, text=True, env=environment()
    )
    assert process.stderr is not None
    try:
        port = port_of(process.stderr)
        drain = threading.Thread(target=process.stderr.read, daemon=True)
        drain.start()
        with ThreadPoolExecutor(8) as pool:
            leaving = [pool.submit(leave_early, port) for _ in range(2)]
            found = list(pool.map(lambda body: post(port, body), REQUESTS))
        assert all(future.result() for future in leaving)
        again = post(port, REQUESTS[0])  # after texts that left: their places and prefixes are others'
        assert again == found[0]
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
    finally:
        process.kill()
    return found


def port_of(said: Iterable[str]) -> int:
    """Read what a server says until it names the port that it took."""
    for line in said:
        if found := re.search(r"answers at http://[^ ]*:(\d+)/", line):
            return int(found.group(1))
    raise AssertionError("it did not start")


def post(port: int, body: dict[str, Any]) -> list[Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        choices = json.load(answer)["choices"]
    return [[choice["text"], choice["finish_reason"]] for choice in choices]


def leave_early(port: int) -> bool:
    """Begin to read a long stream, and leave."""
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    body = json.dumps({"prompt": "a long one", "max_tokens": 200, "stream": True})
    client.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    read = client.getresponse().read(20)
    client.close()
    return len(read) == 20


@pytest.mark.slow
def test_a_server_on_two_ranks_answers_as_one_process_does(chatty: str) -> None:
    pytest.importorskip("fastapi", reason="the server's extra is not installed")
    assert served(chatty, split=True) == served(chatty, split=False)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 1)])
def test_a_server_ends_though_its_other_rank_hangs(number: signal.Signals, code: int, chatty: str) -> None:
    """A signal ends rank 0 though its step waits for a rank that is stopped."""
    pytest.importorskip("fastapi", reason="the server's extra is not installed")
    from eagle_fsd.serving.server import SHUTDOWN_SECONDS

    flags = ("--tp-plan", "auto", "--port", "0", "--base-model", chatty, *FLAGS, *SIZES)
    started = [sys.executable, "-m", "eagle_fsd.serve", *flags]
    with contextlib.ExitStack() as kept:
        ranks = [
            subprocess.Popen(started, stderr=subprocess.PIPE, text=True, env=environment(**place))
            for place in kept.enter_context(two_places())
        ]
        for process in ranks:
            kept.callback(process.wait)
            kept.callback(process.kill)
        port = port_of(ranks[0].stderr)
        assert post(port, REQUESTS[0])
        ranks[1].send_signal(signal.SIGSTOP)

        def ask_in_vain() -> None:
            with contextlib.suppress(OSError):
                post(port, REQUESTS[0])

        hanging = threading.Thread(target=ask_in_vain)
        hanging.start()
        time.sleep(3)
        ranks[0].send_signal(number)
        assert ranks[0].wait(timeout=SHUTDOWN_SECONDS + FAREWELL + 20) == code
        assert ("waits for other ranks" in ranks[0].stderr.read()) == (code == 1)
        hanging.join()


# -- more families and drafters ----------------------------------------


@pytest.mark.slow
def test_other_families_and_drafters(folder: Path) -> None:
    """The texts of two ranks are those of one, whatever is split and whatever drafts."""
    families = ("mixtral", "gemma3", "qwen2-window", "granite", "phi3", "olmo2")
    jobs: Jobs = [
        ("answers", {"base_model": saved(folder, family), "draft_layers": 1}) for family in families
    ]
    llama = saved(folder)
    few = tiny_head().restrict(torch.arange(3, 90, 2))
    save_head(few, folder / "few")
    save_eagle3(eagle3_head(), folder / "eagle3")
    jobs += [
        ("answers", {"base_model": llama, "ea_model": str(folder / "few")}),
        ("answers", {"base_model": llama, "ea_model": str(folder / "few"), "lookup": True}),
        ("answers", {"base_model": llama, "ea_model": str(folder / "eagle3")}),
        ("answers", {"base_model": llama, "ea_model": "none", "lookup": True}),
        ("answers", {"base_model": llama, "draft_model": llama}),
        ("identity", {"base_model": llama, "ea_model": str(folder / "few")}),
    ]
    found = on_two_ranks(folder, jobs)
    for number, job in enumerate(jobs):
        assert found[0][number] == found[1][number] == run_job(*job), job


@pytest.mark.slow
def test_a_tree_is_measured_on_rank_0(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(folder / "cache"))
    job = ("auto_tree", {"base_model": saved(folder), "draft_layers": 1})
    found = on_two_ranks(folder, [job, job])
    assert found[0] == found[1]  # a busy machine may measure another tree the second time, on both ranks
    _tree, texts = found[0][0]
    model = EagleFSD.from_pretrained(**job[1], dtype="float32", pack=False, runtime="torch")
    assert model.generate([[5, 6, 7]], tree=TreeConfig(1), max_new_tokens=12).new_tokens == texts
