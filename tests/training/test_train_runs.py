"""Training as processes: killed and resumed, several at once, followed by a tracker, with curves."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from support.training_world import losses
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eagle_fsd.training.cli import require_tracker
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
    """A training of some hundred small steps."""
    features = () if "--online" in more else ("--features", str(toy / "features"))
    return [
        *("train/train_head.py", "--base-model", str(toy / "target"), "--data", str(toy / "rows.jsonl")),
        *("--output", str(output), *features, "--extract-dtype", "float32"),
        *("--float32", "--held-out", "4", "--batch-tokens", "64", "--epochs", "60", "--noise", "0.1"),
        *("--unroll", "2", "--unroll-after", "0.5", "--eval-every", "50", "--checkpoint-every", "10", *more),
    ]


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
        # As `accelerate config` may leave it: a run's precision is its own argument all the same.
        "ACCELERATE_MIXED_PRECISION": "bf16",
    }


def start(arguments: list[str], *launcher: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *launcher, *arguments],
        cwd=ROOT,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return said


def steps_of(output: Path) -> int:
    return sum("loss" in record for record in read_log(output))


def interrupt(process: subprocess.Popen[str], output: Path, at_step: int, number: int) -> None:
    """Send the signal as soon as so many steps are logged, whatever the process is at."""
    deadline = time.monotonic() + 240
    while steps_of(output) < at_step:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)


@pytest.fixture(scope="module")
def whole(toy: Path) -> Path:
    """A run that nothing disturbed, with a tracker where one is installed."""
    output = toy / "whole"
    tracker = "tensorboard" if find_spec("tensorboard") else "none"
    finish(start(command(toy, output, "--report-to", tracker)))
    return output


def test_a_run_killed_and_terminated_has_the_losses_of_one_that_was_not(toy: Path, whole: Path) -> None:
    output = toy / "killed"
    total = steps_of(whole)
    interrupt(start(command(toy, output)), output, total // 5, signal.SIGKILL)
    killed_at = steps_of(output)
    interrupt(start(command(toy, output)), output, total // 2, signal.SIGTERM)
    stopped_at = read_checkpoint(output / CHECKPOINT)["step"]
    assert total // 5 <= killed_at < total // 2 <= stopped_at == steps_of(output) < total
    finish(start(command(toy, output)))
    assert losses(output) == losses(whole)
    heads = [read_checkpoint(folder / BEST)["head"] for folder in (output, whole)]
    assert all(torch.equal(heads[0][name], heads[1][name]) for name in heads[1])


def test_a_run_whose_terminal_is_closed_ends_with_a_checkpoint(toy: Path) -> None:
    pty, output = pytest.importorskip("pty"), toy / "closed"
    ours, its = pty.openpty()
    # It becomes the one that is told, also where the tests themselves were begun with nohup.
    leads = "import fcntl, signal, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)"
    heeds = "signal.signal(signal.SIGHUP, signal.SIG_DFL)"
    runs = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    more = ("--epochs", "6000")  # it does not end by itself
    process = subprocess.Popen(
        [sys.executable, "-c", f"{leads}; {heeds}; {runs}", *command(toy, output, *more)],
        cwd=ROOT, env=environment(), stdin=its, stdout=its, stderr=its, start_new_session=True,
    )  # fmt: skip
    os.close(its)
    said = b""
    try:
        while not (output / LOG).is_file() or steps_of(output) < 12:
            said += os.read(ours, 4096) if select.select([ours], [], [], 0.05)[0] else b""
            assert process.poll() is None, said
        os.close(ours)
        assert process.wait(60) == 128 + signal.SIGHUP, said
    finally:
        process.kill()
    stopped_at = read_checkpoint(output / CHECKPOINT)["step"]
    assert stopped_at == steps_of(output) >= 12


def test_two_processes_share_what_one_accumulates(toy: Path) -> None:
    """The same batches make a step, so the losses are the same; the two take turns with the shards."""
    features = ["--features", str(toy / "shared"), "--epochs", "6"]
    launch = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
    ]  # accelerate's needs mpirun on CPUs
    finish(start(command(toy, toy / "two", *features), *launch))
    finish(start(command(toy, toy / "one", *features, "--accumulate", "2")))
    assert losses(toy / "two") == pytest.approx(losses(toy / "one"), rel=1e-4)
    assert json.loads((toy / "two" / "provenance.json").read_text())["processes"] == 2
    with pytest.raises(AssertionError, match=r"is of another run \(batches_per_step was 2, now 1\)"):
        finish(start(command(toy, toy / "two", *features)))


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
    finish(start(command(toy, output, "--online", "--epochs", "12")))
    finish(start(command(toy, toy / "stored", "--epochs", "12")))
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
