"""The two passes over every weight format, each in a process of its own, and the rows that they append.

The first lets the format read the reference's answers beside the reference, and compares their distributions.
It converts what a runtime must convert. The second holds the format alone, started from what was kept on disk
as a user's second start is, decodes the prompts and notes the memory.

Products with few bits round their activations, and what is rounded depends on how many tokens a forward has.
So a text is read in two ways: all at once, as a prompt is, and some tokens a forward, as trees are verified.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from eagle_fsd import hub
from eagle_fsd.acceptance.divergence import tv
from eagle_fsd.core.config import TreeConfig
from eagle_fsd.core.process.signals import EXIT_INTERRUPTED
from eagle_fsd.core.tree import DraftTree, root_only
from eagle_fsd.engine import EagleFSD
from eagle_fsd.evaluation.measure.memory import memory
from eagle_fsd.evaluation.measure.observers import answer_features
from eagle_fsd.evaluation.prompt_sets import answer
from eagle_fsd.files.fingerprints import digest_json
from eagle_fsd.files.jsonl import append_row
from eagle_fsd.files.provenance import provenance
from eagle_fsd.target.model import TargetModel
from eagle_fsd.target.session import TargetSession
from eagle_fsd.text.chat import encode_as_trained

DECODE, READ = "decode", "read"
SOON = 5.0  # seconds
NODES = 8  # tokens of a forward as trees have them
AT_ONCE, AS_TREES = "at_once", "as_trees"
Tokens = Sequence[int]
CPU = torch.device("cpu")
Row = dict[str, Any]


@dataclass(frozen=True)
class Question:
    """A prompt. sample: its set and number, as gsm8k/3. answer: the reference's token ids, once known."""

    sample: str
    text: str
    answer: tuple[int, ...] = ()


@dataclass(frozen=True)
class Job:
    """A weight format on a runtime, and how it is measured.

    models: a digest of the files of target and head. output: JSONL of rows.
    """

    runtime: str
    weight_format: str
    base_model: str
    ea_model: str | None
    models: str
    tree: str
    max_new_tokens: int
    output: Path

    @property
    def name(self) -> str:
        return f"{self.runtime}/{self.weight_format}"

    def settings(self) -> Row:
        """Return what every row of this job says of it."""
        return {name: value for name, value in asdict(self).items() if name != "output"}

    def key(self, measure: str, question: Question) -> str:
        """Return what a row depends on. Reading depends on the answer, decoding does not."""
        text = [*question.answer, NODES] if measure == READ else []
        return digest_json(measure, self.settings(), question.text, text)


def read_answers(job: Job, questions: Sequence[Question]) -> None:
    """Append a row for each question: how far the format's distributions are from the reference's, by place.

    The reference is Hugging Face's model in float32, with its own layers, which reads each answer at once.
    """
    engine = load_engine(job)
    reference = load_reference(job.base_model)
    made = provenance(CPU)
    for question in tqdm(questions, desc=f"{job.name}: reading", unit="answer"):
        prompt = prompt_ids(engine, question)
        wanted = READINGS["at_once"](reference, prompt, question.answer)
        row: Row = {"tv": {}, "same": {}}
        for name, read in READINGS.items():
            found = distances(read(engine.target, prompt, question.answer), wanted)
            row["tv"][name] = [float(f"{value:.4g}") for value in found[0]]
            row["same"][name] = sum(found[1])
        append(job, READ, question, row | made)


def decode_prompts(job: Job, questions: Sequence[Question]) -> None:
    """Append a row for each question: greedy texts of plain and lossless decoding, their steps, the memory.

    libraries: bytes that the process had before it loaded anything.
    """
    libraries = memory(CPU)["resident"]
    engine, tree = load_engine(job), TreeConfig.parse(job.tree)
    made = {"weight_bytes": engine.target.weight_bytes, "libraries": libraries, **provenance(CPU)}
    for question in tqdm(questions, desc=f"{job.name}: decoding", unit="prompt"):
        prompt = [prompt_ids(engine, question)]
        plain = answer(engine, prompt, max_new_tokens=job.max_new_tokens, tree=TreeConfig(1))
        lossless = answer(engine, prompt, max_new_tokens=job.max_new_tokens, tree=tree)
        row = {
            "plain": plain.new_tokens[0],
            "lossless": lossless.new_tokens[0],
            "steps": lossless.stats[0].steps,
            "new_tokens": lossless.stats[0].new_tokens,
            **memory(CPU),
        }
        append(job, DECODE, question, row | made)


def append(job: Job, measure: str, question: Question, row: Row) -> None:
    about = {"key": job.key(measure, question), "sample": question.sample, "seed": 0, "measure": measure}
    append_row(job.output, about | job.settings() | row)


def load_engine(job: Job) -> EagleFSD:
    """Load target and head in the job's format, on the CPU."""
    how = {"runtime": job.runtime, "weight_format": job.weight_format, "device": "cpu", "lookup": False}
    return EagleFSD.from_pretrained(job.base_model, job.ea_model, **how)


def load_reference(base_model: str) -> TargetModel:
    """Load the target in float32 as Hugging Face runs it."""
    return TargetModel(hub.load_target(base_model, torch.float32, CPU)[0])


def prompt_ids(engine: EagleFSD, question: Question) -> list[int]:
    return encode_as_trained(engine.tokenizer, question.text)


@torch.inference_mode()
def read_at_once(target: TargetModel, prompt: Tokens, answer: Tokens) -> Tensor:
    """Return the logits [n, V] float32 of the answer's n tokens, which are read as a part of the prompt."""
    return target.logits(answer_features(target, [prompt], [answer])[0])


@torch.inference_mode()
def read_as_trees(target: TargetModel, prompt: Tokens, answer: Tokens, nodes: int = NODES) -> Tensor:
    """Return the same logits of forwards over `nodes` nodes each, chains that are verified and kept.

    The last chain is filled up, so that all forwards have one size.
    """
    start = torch.tensor([prompt[:-1]], dtype=torch.int64, device=target.device)
    rest = [prompt[-1], *answer[:-1]]
    session = TargetSession(target, 1, len(prompt) + len(rest) + nodes)
    session.prefill(start, [start.shape[1]])
    logits = []
    for place in range(0, len(rest), nodes):
        part = rest[place : place + nodes]
        found, _ = session.verify(chain(part, target, nodes))
        session.keep(torch.arange(len(part), device=target.device)[None], [len(part)])
        logits.append(found[0, : len(part)])
    return torch.cat(logits)


READINGS: dict[str, Callable[[TargetModel, Tokens, Tokens], Tensor]] = {
    AT_ONCE: read_at_once,
    AS_TREES: read_as_trees,
}


def chain(tokens: Tokens, target: TargetModel, nodes: int) -> DraftTree:
    """Return the tree in which every token is the only child of the one before, filled up to `nodes`."""
    text = torch.tensor([list(tokens)], device=target.device)  # [1, n]
    places = torch.arange(len(tokens), device=target.device)[None]
    root = root_only(text[:, 0], target.vocab_size, most=nodes)
    return replace(root, tokens=text, parents=places - 1, depths=places, depth=nodes - 1).filled_up()


def distances(found: Tensor, reference: Tensor) -> tuple[list[float], list[bool]]:
    """Return the total variation of two next-token distributions at temperature 1, and whether both have the
    same likeliest token, by position of their logits [n, V]."""
    same = found.argmax(-1) == reference.argmax(-1)
    return tv(reference, found).tolist(), same.tolist()


def in_own_process(work: Callable[..., object], *arguments: Any) -> None:
    """Run a module's function in a fresh process, and raise its ValueError or OSError here.

    Raises ValueError if the process ends in any other way before the function does; its own traceback has
    gone to stderr then. The process does not outlive this one for longer than the function runs.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=send_mistake, args=(sender, work, arguments), daemon=True)
    process.start()
    sender.close()  # so that the process's own end is the only one, and its death is noticed
    try:
        mistake = receiver.recv()
    except EOFError:
        process.join()
        raise ValueError(
            f"the process of {work.__name__} ended early, with exit code {process.exitcode}: it must run to "
            "its end; free some memory, or see its error above, and start again, which keeps its rows"
        ) from None
    except KeyboardInterrupt:
        process.join(SOON)  # Ctrl-C reaches it too, and it leaves nothing behind
        raise
    process.join()
    if mistake is not None:
        raise mistake


def send_mistake(sender: Any, work: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    """Call a function, and send the user's mistake; None where it made none."""
    mistake = None
    try:
        work(*arguments)
    except (ValueError, OSError) as error:
        mistake = error
    except KeyboardInterrupt:  # the parent has it too, and says so
        sys.exit(EXIT_INTERRUPTED)
    sender.send(mistake)
