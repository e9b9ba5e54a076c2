"""Texts under a constraint: a plain language of token sequences decides what is right."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from support.schema_engine import END_ID, schema_engine
from support.tiny_models import VOCAB, tiny_model
from torch import Tensor

from eagle_fsd import EagleFSD, Fuzzy, GenerationOptions, Lossless, TreeConfig
from eagle_fsd.acceptance.accept import AcceptanceRule
from eagle_fsd.acceptance.other_rules import Cactus, Ensemble, FLy, PublishedFSD, RelaxedTopK, SGLang, Typical
from eagle_fsd.core.processing import Processing
from eagle_fsd.core.tree import DraftTree
from eagle_fsd.decoding.logits.constrained import ConstrainedText
from eagle_fsd.decoding.logits.processing import TextProcessor, process
from eagle_fsd.decoding.request import FAILED, Terms, Text
from eagle_fsd.decoding.scheduler import Scheduler
from eagle_fsd.decoding.steps.failures import NothingAllowed
from eagle_fsd.drafting.draft_model import DraftModelSpec
from eagle_fsd.runtime.openvino.library import is_installed
from eagle_fsd.target.model import TargetModel

TREE = TreeConfig(8, 3, 4)


@dataclass(frozen=True)
class Language:
    """A constraint that allows these token sequences."""

    words: frozenset[tuple[int, ...]]
    name: str = "language"

    @cached_property
    def nexts(self) -> dict[tuple[int, ...], set[int]]:
        found: dict[tuple[int, ...], set[int]] = {}
        for word in self.words:
            for place, token in enumerate(word):
                found.setdefault(word[:place], set()).add(token)
        return found

    def begin(self) -> Reader:
        return Reader(self)

    def may_follow(self, text: tuple[int, ...]) -> set[int]:
        return self.nexts.get(text, set()) | ({END_ID} if text in self.words else set())


class Reader:
    failure = ""

    def __init__(self, language: Language) -> None:
        self.language, self.text, self.read = language, (), 0

    @property
    def complete(self) -> bool:
        return self.text in self.language.words

    def allowed(self) -> Tensor:
        found = torch.zeros(VOCAB + 5, dtype=torch.bool)  # a library may know more tokens than the target
        found[list(self.language.nexts.get(self.text, ()))] = True
        return found

    def advance(self, token: int) -> None:
        assert self.allowed()[token], "a refused token was followed"
        self.text, self.read = (*self.text, token), self.read + 1

    def back(self) -> None:
        self.text = self.text[:-1]


def some_words(seed: int, tokens: int, length: int, count: int) -> Language:
    """Return a language of words of different lengths, some of which begin others."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(4, 4 + tokens, (count, length), generator=generator).tolist()
    lengths = torch.randint(length // 2, length + 1, (count,), generator=generator).tolist()
    return Language(frozenset(tuple(word[:size]) for word, size in zip(drawn, lengths, strict=True)))


def bound(model: EagleFSD, language: Language, **options: Any) -> Processing:
    made = GenerationOptions(**options).processing
    return Processing(**{**vars(made), "constraint": language})


def run(
    model: EagleFSD,
    prompts: Sequence[Sequence[int]],
    languages: Sequence[Language | None],
    rule: AcceptanceRule = Lossless(),  # noqa: B008
    tree: TreeConfig = TREE,
    limit: int = 24,
    seed: int = 7,
    rows: int = 4,
    **options: Any,
) -> list[Text]:
    """Decode each prompt in its language, all in one scheduler."""
    scheduler = Scheduler(model.target, model.drafter, tree, rows=rows)
    texts = []
    for number, (prompt, language) in enumerate(zip(prompts, languages, strict=True)):
        made = GenerationOptions(**options)
        processing = made.processing if language is None else bound(model, language, **options)
        terms = Terms((END_ID,), rule, made.sampling, processing)
        texts.append(Text(number, limit, terms, prompt=prompt, stream=(seed, number)))
        scheduler.admit(texts[-1])
    for _ in scheduler.run():
        pass
    return texts


def prompts(count: int) -> list[list[int]]:
    return torch.randint(4, VOCAB, (count, 6), generator=torch.Generator().manual_seed(5)).tolist()


def greedy_twin(model: EagleFSD, prompt: Sequence[int], language: Language, limit: int = 24) -> list[int]:
    """Choose the likeliest token of those that may follow, one forward each."""
    made: list[int] = []
    while len(made) < limit and END_ID not in made:
        with torch.no_grad():
            logits = model.target.model(torch.tensor([[*prompt, *made]])).logits[0, -1]
        made.append(max(sorted(language.may_follow(tuple(made))), key=lambda token: float(logits[token])))
    return made


@cache
def languages(count: int) -> list[Language]:
    return [some_words(seed, 40, 12, 6000) for seed in range(count)]


@pytest.mark.parametrize(
    "runtime",
    [
        "torch",
        pytest.param(
            "openvino",
            marks=[pytest.mark.slow, pytest.mark.skipif(not is_installed(), reason="needs openvino")],
        ),
    ],
)
@pytest.mark.parametrize("tree", [TREE, TreeConfig(1)])
def test_greedy_texts_are_those_of_a_plain_loop(runtime: str, tree: TreeConfig) -> None:
    model, asked = schema_engine(runtime), languages(8)
    texts = run(model, prompts(8), asked, tree=tree)
    for text, prompt, language in zip(texts, prompts(8), asked, strict=True):
        assert text.new_tokens == greedy_twin(model, prompt, language)
        assert text.stats.finish_reason == "stop" and tuple(text.new_tokens[:-1]) in language.words


def test_every_node_is_refused_what_its_path_does_not_allow() -> None:
    """Below refused tokens and after end tokens nothing changes, and a shared path is read once."""
    language = some_words(1, 4, 5, 200)
    seen = {"refused": 0, "only ends": 0, "below": 0}
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        nodes = 12
        parents = [
            -1,
            *(int(torch.randint(node, (), generator=generator)) for node in range(1, nodes - 1)),
            -1,
        ]
        tokens = torch.randint(3, 8, (nodes,), generator=generator)
        tokens[torch.rand(nodes, generator=generator) < 0.1] = END_ID
        word = sorted(language.words)[seed]
        text = list(word[: int(torch.randint(len(word) + 1, (), generator=generator))])
        nothing = torch.zeros(1, 0, 8), torch.zeros(1, 0, dtype=torch.int64)
        shape = torch.tensor([parents]), torch.zeros(1, nodes).long()
        tree = DraftTree(tokens[None], *shape, *nothing, depth=nodes)
        processor = TextProcessor(bound(schema_engine(), language), [5, 6], (END_ID,))
        processor.add(text[:1])
        processor.add(text[1:])
        raw = torch.randn(1, nodes, VOCAB, generator=generator)
        found = process(raw, tree, [processor])[0]
        paths: list[tuple[int, ...] | None] = [tuple(text)]
        for node in range(1, nodes):
            above = paths[parents[node]] if parents[node] >= 0 else None
            token = int(tokens[node])
            fits = above is not None and token != END_ID and token in language.may_follow(above)
            paths.append((*above, token) if above is not None and fits else None)
        for node, path in enumerate(paths):
            wanted = raw[0, node].clone()
            if path is not None:
                may = language.may_follow(path)
                wanted[[token for token in range(VOCAB) if token not in may]] = -torch.inf
                seen["refused"] += 1
                seen["only ends"] += may == {END_ID}
            seen["below"] += path is None
            assert torch.equal(found[node], wanted)
        assert processor.constrained is not None
        walk = processor.constrained.walk
        assert isinstance(walk, Reader) and walk.text == tuple(text)
        assert walk.read == len(text) + sum(path is not None for path in paths[1:])
    assert min(seen.values()) > 10


RULES: dict[str, AcceptanceRule] = {
    "lossless": Lossless(),
    "fuzzy": Fuzzy(1e9),
    "likeliest": Fuzzy(1e9, child="likeliest", exact_eos=False),
    "paper": Fuzzy(1e9, mode="paper"),
    "planned": Fuzzy(1e9, price=0.01),
    "planned kl": Fuzzy(1e9, price=0.01, cost="kl", mode="paper"),
    "typical": Typical(0.0, 0.0, exact_eos=False),
    "relaxed": RelaxedTopK(VOCAB, 1.0, exact_eos=False),
    "sglang": SGLang(0.0, 1.0),
    "cactus": Cactus(100.0),
    "ensemble": Ensemble(0.0),
    "fly": FLy(0.0, 1),
    "published": PublishedFSD(1e9),
}
RELAXES_GREEDY = set(RULES) - {"lossless", "sglang", "cactus"}


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_rule_follows_a_refused_token(name: str, temperature: float) -> None:
    model, asked = schema_engine(), languages(8) * 3
    texts = run(model, prompts(24), asked, RULES[name], temperature=temperature, rows=24)
    for text, language in zip(texts, asked, strict=True):
        assert tuple(text.new_tokens[:-1]) in language.words and text.new_tokens[-1] == END_ID
    relaxed = sum(text.stats.fuzzy_accepts for text in texts)
    assert (relaxed > 0) == (name in RELAXES_GREEDY or (temperature > 0 and name != "lossless"))


def test_sampled_texts_have_the_target_s_distribution_over_what_is_allowed() -> None:
    """Three letters of three, then the end: every probability is known."""
    model, prompt = schema_engine(), [5, 6, 7, 8]
    words = [word for size in (1, 2, 3) for word in itertools.product((40, 41, 42), repeat=size)]
    language = Language(frozenset(words))
    with torch.no_grad():
        padded = torch.tensor([[*prompt, *word] for word in words if len(word) == 3])
        logits = model.target.model(padded).logits[:, 3:]  # [27, 4, V]
    chances: dict[tuple[int, ...], float] = {}
    for row, word in enumerate(word for word in words if len(word) == 3):
        left = 1.0
        for place in range(4):
            may = sorted(language.may_follow(word[:place]))
            p = dict(zip(may, (logits[row, place, may] / 1.5).softmax(-1).tolist(), strict=True))
            if END_ID in p:
                chances[word[:place]] = left * p[END_ID]
            left *= p[word[place]] if place < 3 else 1.0
    assert sum(chances.values()) == pytest.approx(1)
    count = 1500
    texts = run(
        model, [prompt] * count, [language] * count, temperature=1.5, rows=500, tree=TreeConfig(12, 3, 6)
    )
    drawn = [tuple(text.new_tokens[:-1]) for text in texts]
    assert sum(text.stats.exact_accepts for text in texts) > 30
    common = [word for word in words if chances[word] * count >= 5]
    expected = [chances[word] * count for word in common]
    counted = [float(drawn.count(word)) for word in common]
    expected.append(count - sum(expected))
    counted.append(count - sum(counted))
    assert len(common) > 8 and min(expected) > 1
    assert chisquare(counted, expected).pvalue > 1e-4


def test_texts_of_a_batch_have_each_its_own_language_or_none() -> None:
    model = schema_engine()
    asked: list[Language | None] = [*languages(3), None, None, *languages(3)]
    together = run(model, prompts(8), asked, temperature=0.8)
    for number, text in enumerate(together):
        alone = Text(0, 24, text.terms, prompt=text.prompt, stream=text.stream)
        scheduler = Scheduler(model.target, model.drafter, TREE, rows=1)
        scheduler.admit(alone)
        for _ in scheduler.run():
            pass
        assert alone.new_tokens == text.new_tokens
        if (language := asked[number]) is not None:
            assert tuple(text.new_tokens[:-1]) in language.words


def test_the_end_comes_where_nothing_else_may() -> None:
    """Also before min_new_tokens, which only holds where the text can go on."""
    model = schema_engine()
    language = Language(frozenset({(10, 11), (10, 11, 12, 13), (20, 21)}))
    (long,) = run(model, prompts(1), [language], min_new_tokens=3, logit_bias={10: 50.0})
    assert long.new_tokens == [10, 11, 12, 13, END_ID]
    (short,) = run(model, prompts(1), [language], min_new_tokens=9, logit_bias={20: 50.0})
    assert short.new_tokens == [20, 21, END_ID] and short.stats.finish_reason == "stop"
    (cut,) = run(model, prompts(1), [language], limit=2, min_new_tokens=9)
    assert len(cut.new_tokens) == 2 and cut.stats.finish_reason == "length"


@pytest.mark.parametrize("banned", [{"suppress_tokens": [11]}, {"bad_words_ids": [[11]]}])
def test_where_nothing_is_allowed_a_text_fails_alone(banned: dict[str, Any]) -> None:
    model, many = schema_engine(), prompts(3)
    free, word = Language(frozenset({(20, 21, 22)})), Language(frozenset({(10, 11)}))
    first, failed, last = run(model, many, [free, word, languages(1)[0]], **banned)
    assert failed.stats.finish_reason == FAILED and failed.new_tokens == [10]
    assert isinstance(failed.failure, NothingAllowed)
    assert re.match(r"step \d of row 1: language and the other options allow no", str(failed.failure))
    expected = run(model, many, [free, None, languages(1)[0]], **banned)
    assert [first.new_tokens, last.new_tokens] == [expected[0].new_tokens, expected[2].new_tokens]
    assert first.failure is None and last.failure is None


def test_where_nothing_is_allowed_generate_raises() -> None:
    everything = list(range(VOCAB))
    with pytest.raises(NothingAllowed, match=r"^step 1 of row 0: the options allow no token here; take bans"):
        schema_engine().generate(prompts(2), max_new_tokens=3, tree=TREE, suppress_tokens=everything)


def test_a_processor_that_leaves_nothing_is_named() -> None:
    named = (
        r"^step 1 of row \d: the options leave no token with a finite logit here; let logits_processor ret"
    )
    for spoils in (ban_all_of(prompts(2)[1]), lambda ids, logits: logits * float("nan")):
        with pytest.raises(NothingAllowed, match=named):
            schema_engine().generate(prompts(2), max_new_tokens=3, tree=TREE, logits_processor=spoils)


TREES = [TreeConfig(1), TreeConfig(3, 2, 2), TreeConfig(8, 4, 2)]


def drafted_by_itself() -> EagleFSD:
    """A tiny target as its own draft model: its trees hold what comes, also after the end of a text."""
    target = TargetModel(tiny_model())
    return EagleFSD(target, DraftModelSpec.for_target(TargetModel(tiny_model()), target))


def nothing_after(token: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a processor that leaves no token to answers to three tokens once they have this one."""

    def processor(ids: Tensor, logits: Tensor) -> Tensor:
        return logits.masked_fill((ids[:, 3:] == token).any(1, keepdim=True), -torch.inf)

    return processor


@pytest.mark.parametrize("tree", TREES, ids=str)
@pytest.mark.parametrize("ends", ["token", "stopper", "limit"])
def test_what_would_come_after_the_end_of_a_text_is_of_no_concern(tree: TreeConfig, ends: str) -> None:
    """Processors may leave no token there, as a grammar of the user's own does after an end token."""
    model, prompt = drafted_by_itself(), [[5, 6, 7]]
    plain = model.generate(prompt, max_new_tokens=3, temperature=0.0, tree=TreeConfig(1)).new_tokens[0]
    processing = GenerationOptions(logits_processor=nothing_after(plain[2])).processing
    eos = (plain[2],) if ends == "token" else ()
    text = Text(0, 3 if ends == "limit" else 9, Terms(eos, processing=processing), prompt=prompt[0])
    if ends == "stopper":
        text.stopper = lambda tokens: tokens.index(plain[2]) + 1 if plain[2] in tokens else None
    scheduler = Scheduler(model.target, model.drafter, tree, rows=1)
    scheduler.admit(text)
    for _ in scheduler.run():
        pass
    assert text.new_tokens == plain and text.failure is None
    assert text.stats.finish_reason == ("length" if ends == "limit" else "stop")


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_a_text_that_can_get_no_further_token_keeps_those_that_it_could_get(tree: TreeConfig) -> None:
    model, prompt = drafted_by_itself(), [[5, 6, 7]]
    plain = model.generate(prompt, max_new_tokens=3, temperature=0.0, tree=TreeConfig(1)).new_tokens[0]
    options = GenerationOptions(logits_processor=nothing_after(plain[2]))
    text = Text(4, 9, Terms((), processing=options.processing), prompt=prompt[0])
    scheduler = Scheduler(model.target, model.drafter, tree, rows=1)
    scheduler.admit(text)
    for _ in scheduler.run():
        pass
    assert text.new_tokens == plain and text.stats.new_tokens == 3
    assert text.stats.finish_reason == FAILED and isinstance(text.failure, NothingAllowed)
    seen: list[int] = []
    with pytest.raises(NothingAllowed):
        for tokens in model.stream(prompt, max_new_tokens=9, temperature=0.0, tree=tree, options=options):
            seen += tokens
    assert seen == plain


def ban_all_of(prompt: Sequence[int]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a processor that leaves no token to texts that begin with this prompt."""
    begin = torch.tensor(prompt)

    def processor(ids: Tensor, logits: Tensor) -> Tensor:
        mine = (ids[:, : len(begin)] == begin).all(1)
        return logits.masked_fill(mine[:, None], -torch.inf)

    return processor


class Brittle(Reader):
    """Fails for good after some tokens, as a parser does that reaches a limit."""

    def advance(self, token: int) -> None:
        super().advance(token)
        if self.text in self.language.traps:
            self.failure = "too deep"

    def allowed(self) -> Tensor:
        return torch.zeros(VOCAB + 5, dtype=torch.bool) if self.failure else super().allowed()


@dataclass(frozen=True)
class BrittleLanguage(Language):
    traps: frozenset[tuple[int, ...]] = frozenset()

    def begin(self) -> Reader:
        return Brittle(self)


@pytest.mark.parametrize("seed", range(20))
def test_a_draft_that_fails_a_constraint_does_the_text_no_harm(seed: int) -> None:
    """What may come elsewhere in the tree, and in later steps, is what may come without such a draft."""
    generator = torch.Generator().manual_seed(seed)
    plain = some_words(seed, 4, 8, 200)
    word = sorted(plain.words)[int(torch.randint(len(plain.words), (1,), generator=generator))]
    parents = [-1, *(int(torch.randint(node, (1,), generator=generator)) for node in range(1, 12))]
    tokens = [word[1], *torch.randint(4, 8, (11,), generator=generator).tolist()]
    paths = [[*word[:2]]]
    for node in range(1, 12):
        paths.append([*paths[parents[node]], tokens[node]])
    trap = tuple(paths[int(torch.randint(1, 12, (1,), generator=generator))])
    sound = ConstrainedText(plain, [END_ID])
    brittle = ConstrainedText(BrittleLanguage(plain.words, traps=frozenset({trap})), [END_ID])
    sound.add(word[:2])
    brittle.add(word[:2])
    for _ in range(2):  # the first tree leaves nothing behind
        expected, _ = sound.refused(tokens, parents, VOCAB)
        found, _ = brittle.refused(tokens, parents, VOCAB)
        for node, path in enumerate(paths):
            if tuple(path[: len(trap)]) == trap:
                assert found[node].all() or not found[node].any()  # no text goes on from here
            else:
                assert torch.equal(found[node], expected[node])
    assert brittle.walk.failure == ""
    reached = all(trap[place] in plain.nexts.get(trap[:place], ()) for place in range(2, len(trap)))
    assert brittle.failure == ("too deep" if reached else "")
    brittle.add([word[2]])
    assert brittle.failure == ("too deep" if word[:3] == trap else "")


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_a_text_whose_constraint_fails_says_so(tree: TreeConfig) -> None:
    """Also where the constraint failed on a draft, which the text then took."""
    model, prompt = drafted_by_itself(), [[5, 6, 7]]
    plain = model.generate(prompt, max_new_tokens=4, temperature=0.0, tree=TreeConfig(1)).new_tokens[0]
    brittle = BrittleLanguage(frozenset({tuple(plain)}), traps=frozenset({tuple(plain[:2])}))
    (failed,) = run(model, prompt, [brittle], tree=tree)
    assert failed.new_tokens == plain[:2] and failed.stats.finish_reason == FAILED
    assert "language cannot be followed any further (too deep)" in str(failed.failure)


def test_a_constraint_needs_an_end_token() -> None:
    with pytest.raises(ValueError, match="language needs an end token"):
        ConstrainedText(languages(1)[0], [])


def test_equal_constraints_are_equal_terms() -> None:
    one, two = Language(frozenset({(4, 5)})), Language(frozenset({(4, 5)}))
    assert bound(schema_engine(), one) == bound(schema_engine(), two) != Processing()
    assert bound(schema_engine(), one).active and not Processing().active
