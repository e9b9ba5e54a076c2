"""How much sooner the next turn of a chat starts if what was read and written before has been kept.

    python eval/second_turn.py --history 1500 --question 30 --repeats 5

A chat of `history` tokens, prompt and answer, is followed by a question. The time is from its admission to
its first tokens, in a scheduler that keeps texts and in one that does not. The tokens of a prompt are drawn
at random: reading takes as long, whatever they are.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import torch

from eagle_fsd.core.checks import require_integer
from eagle_fsd.core.config import TreeConfig
from eagle_fsd.decoding.request import Terms, Text
from eagle_fsd.decoding.scheduler import SLICE, Scheduler
from eagle_fsd.engine import EagleFSD
from eagle_fsd.evaluation.cli import load_engine, model_parser, parsed, say
from eagle_fsd.evaluation.markdown_table import markdown_table

KEPT = 2**20  # slots, so that whatever was read is kept


def main(argv: Sequence[str] | None = None) -> None:
    parser = model_parser(__doc__)
    add = parser.add_argument
    add("--history", type=int, default=1500, help="tokens of the first turn; default: %(default)s")
    add("--question", type=int, default=30, help="new tokens of the second turn; default: %(default)s")
    add("--max-new-tokens", type=int, default=64, help="of an answer; default: %(default)s")
    add("--repeats", type=int, default=5, help="chats; the median is shown; default: %(default)s")
    add("--tree", default="16/8/2/0.07", help=f"{TreeConfig.FORM}; default: %(default)s")
    with parsed(parser, argv) as arguments:
        new = arguments.max_new_tokens
        for name in ("question", "max_new_tokens", "repeats"):
            require_integer(name, getattr(arguments, name), 1, "leave it out for the default")
        require_integer("history", arguments.history, new + 1, "it is longer than its answer")
        tree = TreeConfig.parse(arguments.tree)
        engine = load_engine(arguments)
        if (total := arguments.history + arguments.question + new) > engine.target.max_positions:
            raise ValueError(
                f"history, question and answer are {total} tokens: the target has "
                f"{engine.target.max_positions} positions; make the history shorter (--history)"
            )
        found: dict[bool, list[tuple[list[int], float]]] = {False: [], True: []}
        for repeat in range(arguments.repeats + 1):
            for keeps, turns in found.items():
                turn = second_turn(engine, tree, keeps, arguments.history, arguments.question, new, repeat)
                if repeat:  # the first one warms up
                    turns.append(turn)
    medians = {keeps: median(seconds for _, seconds in turns) for keeps, turns in found.items()}
    same = sum(plain == kept for (plain, _), (kept, _) in zip(found[False], found[True], strict=True))
    rows = [
        [name, f"{1000 * medians[keeps]:.0f}", f"{medians[False] / medians[keeps]:.1f}"]
        for keeps, name in ((False, "all is read"), (True, "the first turn was kept"))
    ]
    say(
        f"{arguments.history} tokens and a question of {arguments.question}, slices of {SLICE}, tree {tree}; "
        f"median of {arguments.repeats} chats, {same} of them with equal answers\n"
    )
    say(markdown_table(["second turn", "ms to first tokens", "times as soon"], rows))


def second_turn(
    engine: EagleFSD, tree: TreeConfig, keeps: bool, history: int, question: int, new: int, seed: int
) -> tuple[list[int], float]:
    """Answer a prompt, then the prompt, the answer and a question; see `answer` of the second one."""
    draw = torch.Generator().manual_seed(seed)
    vocabulary = engine.target.vocab_size
    tokens = torch.randint(vocabulary, (history - new + question,), generator=draw).tolist()
    scheduler = Scheduler(engine.target, engine.drafter, tree, 1, prefix_tokens=KEPT if keeps else 0)
    prompt, asked = tokens[: history - new], tokens[history - new :]
    answered, _ = answer(scheduler, prompt, new)
    return answer(scheduler, [*prompt, *answered, *asked], new)


def answer(scheduler: Scheduler, prompt: Sequence[int], new: int) -> tuple[list[int], float]:
    """Return `new` tokens after a prompt, and the seconds until the first of them."""
    start, first, found = time.perf_counter(), 0.0, []
    scheduler.admit(Text(0, new, Terms(()), prompt=prompt))
    for _, tokens in scheduler.run():
        first = first or time.perf_counter() - start
        found += tokens
    return found, first
