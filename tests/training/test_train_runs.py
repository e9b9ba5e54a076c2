"""Training as processes: killed and resumed, several at once, followed by a tracker, with curves."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from support.training_world import ends_in_one_line, losses
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eagle_fsd import EagleFSD
from eagle_fsd.training.cli import require_tracker
from eagle_fsd.training.commands import head as head_command
from eagle_fsd.training.run.curves import CURVES
from eagle_fsd.training.run.folder import BEST, CHECKPOINT, LOG, read_checkpoint, read_log

ROOT = Path(__file__).parents[2]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} end {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, its tokenizer, and rows of text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("toy")
    words = ["<unk>", "</s>", "user", "assistant", "end", *(f"w{number}" for number in range(59))]
    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    rows = [
        {"prompt": f"w{start}", "completion": " ".join(f"w{(start + 3 * step) % 59}" for step in range(9))}
        for start in range(24)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def command(toy: Path, output: Path, *more: str) -> list[str]:
    """A training of some two hundred small steps."""
    features = () if "--online" in more else ("--features", str(toy / "features"))
    return [
        *("train/train_head.py", "--base-model", str(toy / "target"), "--data", str(toy / "rows.jsonl")),
        *("--output", str(output), *features, "--extract-dtype", "float32"),
        *("--float32", "--held-out", "4", "--batch-tokens", "64", "--epochs", "30", "--noise", "0.1"),
        *("--unroll", "2", "--unroll-after", "0.5", "--eval-every", "50", "--checkpoint-every", "10", *more),
    ]


# As `accelerate config` may leave it: a run's precision is its own argument all the same.
ACCELERATE = {"ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "bf16"}


def environment() -> dict[str, str]:
    return {**os.environ, **ACCELERATE, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run_here(arguments: list[str]) -> None:
    """Run a training to its end in this process, which has imported what takes longest, as those compute."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ACCELERATE.items():
            patch.setenv(name, value)
        torch.set_num_threads(1)
        try:
            head_command.main(arguments[1:])
        finally:
            torch.set_num_threads(threads)


def start(arguments: list[str], *launcher: str, unset: str = "") -> subprocess.Popen[str]:
    """Start a program with the tests' environment, but for a variable that is not to be set."""
    return subprocess.Popen(
        [sys.executable, *launcher, *arguments],
        cwd=ROOT,
        env={name: value for name, value in environment().items() if name != unset},
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return said


def steps_of(output: Path) -> int:
    return sum("loss" in record for record in read_log(output))


def kill(process: subprocess.Popen[str], output: Path, at_step: int) -> None:
    """Kill a run as soon as so many steps are logged, whatever it is at."""
    deadline = time.monotonic() + 240
    while steps_of(output) < at_step:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.kill()
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL


def close_terminal(arguments: list[str], output: Path, at_step: int) -> None:
    """Start a run in a terminal, and close that as soon as so many steps are logged."""
    pty = pytest.importorskip("pty")
    ours, its = pty.openpty()
    # It becomes the one that is told, also where the tests themselves were begun with nohup.
    leads = "import fcntl, signal, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)"
    heeds = "signal.signal(signal.SIGHUP, signal.SIG_DFL)"
    runs = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    process = subprocess.Popen(
        [sys.executable, "-c", f"{leads}; {heeds}; {runs}", *arguments],
        cwd=ROOT, env=environment(), stdin=its, stdout=its, stderr=its, start_new_session=True,
    )  # fmt: skip
    os.close(its)
    said = b""
    try:
        while not (output / LOG).is_file() or steps_of(output) < at_step:
            said += os.read(ours, 4096) if select.select([ours], [], [], 0.005)[0] else b""
            assert process.poll() is None, said
        os.close(ours)
        assert process.wait(60) == 128 + signal.SIGHUP, said
    finally:
        process.kill()


@pytest.fixture(scope="module")
def whole(toy: Path) -> Path:
    """A run that nothing disturbed, with a tracker where one is installed."""
    output = toy / "whole"
    tracker = "tensorboard" if find_spec("tensorboard") else "none"
    run_here(command(toy, output, "--report-to", tracker))
    return output


def test_a_run_killed_and_closed_with_its_terminal_has_the_losses_of_one_that_was_not(
    toy: Path, whole: Path
) -> None:
    """What is killed goes on from its last checkpoint; what is told to stop leaves one of its last step."""
    output = toy / "killed"
    total = steps_of(whole)
    kill(start(command(toy, output)), output, total // 5)
    killed_at = steps_of(output)  # a busy machine may see late that it is far enough
    further = (killed_at + total) // 2
    close_terminal(command(toy, output), output, further)
    stopped_at = read_checkpoint(output / CHECKPOINT)["step"]
    assert total // 5 <= killed_at < further <= stopped_at == steps_of(output) < total
    run_here(command(toy, output))
    assert losses(output) == losses(whole)
    heads = [read_checkpoint(folder / BEST)["head"] for folder in (output, whole)]
    assert all(torch.equal(heads[0][name], heads[1][name]) for name in heads[1])


def test_two_processes_share_what_one_accumulates(toy: Path) -> None:
    """The same batches make a step, so the losses are the same; the two take turns with the shards.

    Each adds up two batches, and they exchange gradients with the second one.
    They find each other without `--cpu` and with nothing in the environment that says so.
    """
    features = ["--features", str(toy / "shared"), "--epochs", "6"]
    launch = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
    ]  # accelerate's needs mpirun on CPUs
    two = command(toy, toy / "two", *features, "--accumulate", "2")
    said = finish(start(two, *launch, unset="ACCELERATE_USE_CPU"))
    assert said.count("sequences, ") == 1  # not once by each process
    run_here(command(toy, toy / "one", *features, "--accumulate", "4"))
    assert losses(toy / "two") == pytest.approx(losses(toy / "one"), rel=1e-4)
    mine, other = (read_checkpoint(toy / name / CHECKPOINT, "head")["head"] for name in ("two", "one"))
    for name, weight in other.items():  # a loss hardly shows what each of them has learned
        assert (mine[name] - weight).norm() < 1e-3 * weight.norm(), name
    assert json.loads((toy / "two" / "provenance.json").read_text())["processes"] == 2
    with ends_in_one_line(r".*is of another run \(batches_per_step was 4, now 1\)"):
        run_here(command(toy, toy / "two", *features))


ALONE = """
import argparse, logging, sys
from eagle_fsd.cli import ranks
from eagle_fsd.training.cli import run_command

def run(args):
    logging.getLogger("x").warning("a line of the log")
    raise ValueError("what is wrong")

ranks.GRACE = 0.0  # of rank 0, which does not end this process
run_command(argparse.ArgumentParser("train"), run, sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        ([], ["rank 1: train: error: what is wrong"]),
        (["--no"], ["rank 1: train: error: unrecognized arguments: --no"]),
    ],
)
def test_another_rank_says_no_more_than_what_is_wrong_with_it_alone(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], lines: list[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    process = start(arguments, "-c", ALONE)
    assert process.communicate(timeout=60)[1].splitlines() == lines and process.returncode == 2


def test_a_run_leaves_its_curves(whole: Path) -> None:
    pytest.importorskip("matplotlib", reason="the curves need matplotlib: pip install 'eagle-fsd[train]'")
    assert (whole / CURVES).read_bytes().startswith(b"\x89PNG")


def test_a_tracker_follows_the_run(whole: Path) -> None:
    pytest.importorskip("tensorboard", reason="the test reads tensorboard's files: pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = {
        path.parent for path in whole.rglob("events.out.tfevents.*") if path.parent.name == "eagle_fsd"
    }
    events = EventAccumulator(str(folder)).Reload()
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(losses(whole))
    assert {"held_out.chain_tau", "held_out.top1.1", "lr"} <= set(events.Tags()["scalars"])


def test_a_tracker_that_is_missing_is_named() -> None:
    assert require_tracker("none") is None
    with pytest.raises(ValueError, match=r"--report-to is trackio: .*pip install trackio"):
        require_tracker("trackio" if find_spec("trackio") is None else pytest.skip("trackio is installed"))


def test_online_features_are_the_stored_ones(toy: Path, whole: Path) -> None:
    """Same batches, same losses, and nothing on disk but the run itself."""
    output = toy / "online"
    run_here(command(toy, output, "--online", "--epochs", "12"))
    run_here(command(toy, toy / "stored", "--epochs", "12"))
    assert losses(output) == pytest.approx(losses(toy / "stored"), rel=1e-4)
    assert not list(output.rglob("*.safetensors")) and not (output / "features").exists()


def test_the_log_is_json_without_holes(whole: Path) -> None:
    assert (whole / LOG).read_text().endswith("\n")
    records = read_log(whole)
    steps = [record["step"] for record in records if "loss" in record]
    assert steps == list(range(1, len(steps) + 1))
    measured = [record["step"] for record in records if "memory" in record]
    assert measured == [step for step in steps if step % 20 == 0]
    if sys.platform == "linux":
        assert all(10**8 < record["memory"] < 10**11 for record in records if "memory" in record)


@pytest.mark.parametrize("kind", ["", "--eagle3 --taps 1,2", "--eagle3 --taps 1,2 --layout speculators"])
def test_a_head_of_another_target_of_the_same_sizes_is_named(
    toy: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """By the targets' weights: a copy in another folder, or in another dtype, is the same target."""
    head = tmp_path / "head"
    words = command(toy, tmp_path / "run", "--epochs", "1", "--online", "--export", str(head), *kind.split())
    run_here([word for word in words if word not in ("--noise", "0.1")])  # EAGLE-3 heads learn without
    copy, other, half = (
        shutil.copytree(toy / "target", tmp_path / name) for name in ("copy", "other", "half")
    )
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(other))
    model.save_pretrained(other)
    model.half().save_pretrained(half)
    caplog.clear()
    for target, dtype in ((copy, "float32"), (copy, "bfloat16"), (half, "float16")):  # the last: rounded
        EagleFSD.from_pretrained(str(target), str(head), runtime="torch", dtype=dtype)
    assert "trained for" not in caplog.text
    EagleFSD.from_pretrained(str(other), str(head), runtime="torch", dtype="float32")
    (line,) = [line for line in caplog.messages if "trained for" in line]
    assert line.startswith(
        f"draft head {head} was trained for a target with other weights than those of {other}:"
    )
    config = json.loads((head / "config.json").read_text())
    del config["target_weights"]  # as heads of others and of earlier versions
    (head / "config.json").write_text(json.dumps(config))
    caplog.clear()
    EagleFSD.from_pretrained(str(other), str(head), runtime="torch", dtype="float32")
    assert "trained for" not in caplog.text
