"""A learnable toy world for the tests of training: its text, features, heads and runs."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from importlib import import_module
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from eagle_fsd.drafting.eagle_config import HeadConfig
from eagle_fsd.drafting.eagle_head import DraftHead
from eagle_fsd.training.data.shards import FeatureSequence
from eagle_fsd.training.readout import Readout
from eagle_fsd.training.run.folder import CHECKPOINT, LOG
from eagle_fsd.training.schedule import TrainConfig
from eagle_fsd.training.trainer import Trainer

VOCAB, WIDTH = 29, 16


class LetterTokenizer:
    """One token per character, and a chat template of one line per turn."""

    chat_template = "yes"

    def __call__(self, text: str, add_special_tokens: bool = False) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[ord(letter) for letter in text])

    def apply_chat_template(
        self, turns: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool
    ) -> str:
        text = "S\n" + "".join(f"<{turn['role'][0]}>{turn['content']}#\n" for turn in turns)
        return text + ("<a>" if add_generation_prompt else "")


def tiny_head(
    seed: int = 0, scale: float = 0.3, fc_bias: bool = False, trained: int | None = None
) -> DraftHead:
    config = HeadConfig(WIDTH, 24, 4, 2, 4, VOCAB, fc_bias=fc_bias, trained_positions=trained)
    head = DraftHead(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return head


def tiny_target(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    config.initializer_range = 0.4
    return LlamaForCausalLM(config).eval()


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sequences(count: int = 12, seed: int = 0) -> list[FeatureSequence]:
    """Return sequences of a learnable world: 3 x + 1 follows token x, and each token has its own feature."""
    generator = torch.Generator().manual_seed(seed)
    table = world()
    made = []
    for _ in range(count):
        length = int(torch.randint(6, 14, (1,), generator=generator))
        tokens = [int(torch.randint(VOCAB, (1,), generator=generator))]
        while len(tokens) < length:
            tokens.append((3 * tokens[-1] + 1) % VOCAB)
        ids = torch.tensor(tokens)
        made.append(FeatureSequence(ids, torch.arange(length) >= 2, table[ids]))
    return made


def world() -> Tensor:
    """Return features from which the lm_head (the embedding table) reads the next token."""
    return 8.0 * lm_head()[(3 * torch.arange(VOCAB) + 1) % VOCAB]


def lm_head() -> Tensor:
    """Return rows of the same norm, so that the best match of a row is itself."""
    return F.normalize(noise(VOCAB, WIDTH, seed=5), dim=-1)


class InMemory:
    """Examples held in memory."""

    def __init__(self, sequences: Sequence[FeatureSequence]) -> None:
        self.sequences = sequences
        self.tokens = [one.tokens for one in sequences]
        self.learn = [one.learn for one in sequences]

    def read(self, numbers: Sequence[int]) -> list[FeatureSequence]:
        return [self.sequences[number] for number in numbers]


def trainer_for(
    folder: Path, config: TrainConfig, head: DraftHead | None = None, count: int = 12, **changes: Any
) -> Trainer:
    data = sequences(count)
    parts: dict[str, Any] = {
        "head": head or tiny_head(),
        "sequences": data[2:],
        "held_out": data[:2],
        "embedding": lm_head(),
        "readout": Readout(lm_head()),
        "common": torch.arange(5),
    }
    parts |= changes
    data = InMemory(parts.pop("sequences"))
    return Trainer(data=data, numbers=range(len(data.sequences)), config=config, folder=folder, **parts)


class Oracle(torch.nn.Module):
    """Predicts the feature of the token in the pair: right exactly if that is the next token."""

    config = HeadConfig(WIDTH, 24, 4, 2, 4, VOCAB)

    def forward(self, features: Tensor, embeddings: Tensor, positions: Tensor, attend: object) -> Tensor:
        return world()[(embeddings @ lm_head().T).argmax(-1)]


FAST = TrainConfig(
    epochs=4,
    batch_tokens=40,
    learning_rate=3e-3,
    unroll=2,
    unroll_after=0.3,
    eval_every=7,
    checkpoint_every=3,
    bfloat16=False,
)


def conversation(*contents: str, **more: object) -> dict[str, object]:
    roles = ("user", "assistant")
    return {
        "conversations": [{"role": roles[index % 2], "content": text} for index, text in enumerate(contents)],
        **more,
    }


def losses(folder: Path) -> list[float]:
    records = [json.loads(line) for line in (folder / LOG).read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


@contextmanager
def ends_in_one_line(message: str) -> Iterator[None]:
    """Require that a command within ends as a mistake does, its line beginning as this pattern says."""
    with redirect_stderr(StringIO()) as said, pytest.raises(SystemExit) as end:
        yield
    line = said.getvalue().splitlines()[-1]
    assert end.value.code == 2 and re.match(f"[^:]+: error: {message}", line), said.getvalue()


def run_command(name: str, line: str) -> None:
    """Run a command of `eagle-fsd train` with the arguments of a line."""
    import_module(f"eagle_fsd.training.commands.{name}").main(line.split())


def require_exact_resume(make: Callable[[Path], Trainer], folder: Path) -> None:
    """Assert that a run that is stopped at its fifth step goes on to the losses and weights of a whole one.

    make: a trainer for a folder.
    """
    whole = make(folder / "whole")
    whole.run()
    first = make(folder / "parts")
    step = first.train_step

    def stop_after_five(batch: Any) -> Any:
        report = step(batch)
        if first.step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return report

    first.train_step = stop_after_five
    first.run()
    assert first.step == 5 and (folder / "parts" / CHECKPOINT).is_file()
    second = make(folder / "parts")
    second.run()
    assert losses(folder / "whole") == losses(folder / "parts")
    for name, parameter in whole.head.state_dict().items():
        assert torch.equal(parameter, second.head.state_dict()[name]), name
