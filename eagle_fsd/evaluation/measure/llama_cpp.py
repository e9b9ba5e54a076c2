"""llama.cpp as a method of a race: the program that people run on CPUs, on the target's own .gguf file.

It computes with the file's quantised weights, so its texts are near the target's and not equal to them. The
package llama-cpp-python is optional.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from eagle_fsd.core.config import SamplingConfig
from eagle_fsd.core.stats import GenerationStats
from eagle_fsd.hub.resolve import resolve_target

LLAMA_CPP, LLAMA_CPP_LOOKUP = METHODS = ("llama.cpp", "llama.cpp+lookup")
LOOKUP_TOKENS = 2  # as its documentation advises for CPUs; 4 and 10 were slower (eval/SPEED.md)
SEEDS = 2**32 - 1  # the last number of 32 bits stands for a random seed there


class LlamaCpp:
    """A GGUF file in llama.cpp, which answers one prompt at a time.

    capacity: tokens of the longest text. lookup: draft what the text repeats, with llama-cpp-python's own
    prompt lookup, which is for greedy texts here.
    """

    def __init__(self, file: Path, capacity: int, threads: int, lookup: bool = False) -> None:
        self._library, self._lookup = library(), lookup
        options: dict[str, Any] = {"n_ctx": capacity, "n_threads": threads, "n_threads_batch": threads}
        if lookup:
            from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

            options["draft_model"] = LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP_TOKENS)
            options["n_ctx"] += LOOKUP_TOKENS  # its last drafts may go beyond the text
        self._model = self._library.Llama(str(file), verbose=False, **options)

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: SamplingConfig,
        seed: int,
        end_tokens: Collection[int],
    ) -> tuple[list[list[int]], list[GenerationStats]]:
        """Answer one prompt of token ids; return new tokens and stats as lists, as for a batch.

        New tokens include the end token, and stats count one step per token.
        """
        (prompt,) = prompts
        tokens: list[int] = []
        start = prefilled = time.perf_counter()
        with closing(self._tokens(prompt, sampling, seed)) as drawn:
            for token in drawn:
                if not tokens:
                    prefilled = time.perf_counter()
                tokens.append(token)
                if token in end_tokens or len(tokens) == max_new_tokens:
                    break
        count = len(tokens)
        stats = GenerationStats(
            steps=count,
            new_tokens=count,
            accept_histogram=[0, count],
            seconds=time.perf_counter() - start,
            prefill_seconds=prefilled - start,
            finish_reason="stop" if tokens[-1] in end_tokens else "length",
        )
        return [tokens], [stats]

    def _tokens(
        self, prompt: Sequence[int], sampling: SamplingConfig, seed: int
    ) -> Generator[int, None, None]:
        """Yield the tokens of an answer, one after the other, without end."""
        self._model.reset()  # nothing of the prompt before is used again
        if self._lookup:
            yield from self._model.generate(list(prompt), temp=0.0)
            return
        self._model.eval(prompt)
        with self._sampler(sampling, seed) as draw:
            while True:
                yield (token := draw())
                self._model.eval([token])

    @contextmanager
    def _sampler(self, sampling: SamplingConfig, seed: int) -> Iterator[Callable[[], int]]:
        """Yield a function that draws the next token from the logits of the last evaluation.

        Llama's own `generate` applies top-k and top-p before the temperature. Hugging Face and this package
        apply them after it, which gives another distribution, so the samplers are put together here.
        """
        lib = self._library
        if sampling.greedy:
            parts = [lib.llama_sampler_init_greedy()]
        else:
            parts = [
                lib.llama_sampler_init_temp(sampling.temperature),
                lib.llama_sampler_init_top_k(sampling.top_k),
                lib.llama_sampler_init_top_p(sampling.top_p, 1),
                lib.llama_sampler_init_dist(seed % SEEDS),
            ]
        chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        for part in parts:
            lib.llama_sampler_chain_add(chain, part)
        try:
            yield lambda: lib.llama_sampler_sample(chain, self._model.ctx, -1)
        finally:
            lib.llama_sampler_free(chain)


def library() -> ModuleType:
    """Import llama-cpp-python. Raises ValueError that says how to install it."""
    try:
        import llama_cpp
    except ImportError as error:
        raise ValueError(
            f"method {LLAMA_CPP} needs llama-cpp-python, which is not installed: pip install "
            "llama-cpp-python, which compiles it from source in about ten minutes"
        ) from error
    return llama_cpp


def build() -> dict[str, str]:
    """Return the version, and the instruction sets and libraries that it was compiled with."""
    lib = library()
    return {"version": lib.__version__, "system_info": lib.llama_print_system_info().decode().strip()}


def gguf_file(base_model: str) -> Path:
    """Return the .gguf file of a target. Raises ValueError if it has none."""
    source = resolve_target(base_model, weights=False)
    if source.gguf_file is None:
        raise ValueError(
            f"target {base_model!r} is not a .gguf file: {LLAMA_CPP} reads nothing else; name one, or leave "
            f"{LLAMA_CPP} out of the race"
        )
    return source.folder / source.gguf_file
