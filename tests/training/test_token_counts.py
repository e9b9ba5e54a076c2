"""`eagle-fsd train rank` as a user runs it: which tokens a head then drafts, and all that stays as it was."""

from __future__ import annotations

import json
from argparse import Namespace
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support.drafters import feed
from support.tiny_models import greedy_alone
from support.training_world import LetterTokenizer, conversation, ends_in_one_line, run_command
from support.trap_models import VOCAB, WIDTH, exact_pair, random_tokens

from eagle_fsd import EagleFSD, TreeConfig, hub
from eagle_fsd.drafting.eagle_head import DraftHead
from eagle_fsd.hub import load_head, save_head
from eagle_fsd.target.model import TargetModel
from eagle_fsd.training.cli import read_examples
from eagle_fsd.training.data.features import Extraction
from eagle_fsd.training.data.shards import StoredFeatures
from eagle_fsd.training.data.token_counts import learned_tokens

UNKNOWN, END, OTHER_END = 0, 2, 27  # the tokenizer's special tokens, and the target's own end token
ALWAYS = {UNKNOWN, END, OTHER_END}
TREE = TreeConfig(12, 4, 3)
TEMPLATE = (
    "{% for m in messages %}{{ 'w31 ' if m.role == 'assistant' else 'w30 ' }}{{ m.content }} w27 {% endfor %}"
    "{{ 'w31 ' if add_generation_prompt else '' }}"
)


def words(tokens: list[int]) -> str:
    return " ".join(f"w{token:02}" for token in tokens)


@cache
def target_texts() -> list[list[int]]:
    """What the exact target writes: a few tokens often, some never."""
    return greedy_alone(exact_pair()[0], random_tokens(4, 12).tolist(), 40)


class Ranking:
    """The script, on the head that is never wrong, its target's files without weights, and its answers."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer, models, pre_tokenizers

        self.folder = folder
        model, head = exact_pair()
        model.config.save_pretrained(folder / "target")
        transformers.GenerationConfig(eos_token_id=[END, OTHER_END]).save_pretrained(folder / "target")
        tokenizer = Tokenizer(models.WordLevel({f"w{i:02}": i for i in range(VOCAB)}, unk_token="w00"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, unk_token="w00", eos_token="w02", chat_template=TEMPLATE
        ).save_pretrained(folder / "target")
        save_head(head, folder / "head")
        rows = [conversation(words([4, 4, 4]), words(text), words([4]), "w09") for text in target_texts()]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def __call__(
        self, output: str, sizes: str, more: str = "--data {}/rows.jsonl", head: str = "head"
    ) -> None:
        argv = f"--base-model {{}}/target --ea-model {{}}/{head} --output {{}}/{output} {more}"
        argv += f" --draft-vocab-size {sizes}"
        run_command("rank", argv.replace("{}", str(self.folder)))

    def load(self, name: str) -> DraftHead:
        return load_head(str(self.folder / name), WIDTH, VOCAB)


@pytest.fixture
def rank(tmp_path: Path) -> Ranking:
    return Ranking(tmp_path)


def plain_counts() -> Counter[int]:
    """By hand: of every row its two answers and what ends the first; no word of questions or template."""
    return Counter(token for text in target_texts() for token in [*text, OTHER_END, 9])


def plain_list(size: int) -> list[int]:
    counts = plain_counts()
    order = sorted(range(VOCAB), key=lambda token: (-counts[token], token))
    others = [token for token in order if token not in ALWAYS][: size - len(ALWAYS)]
    return [token for token in order if token in ALWAYS or token in others]


def test_the_list_is_what_the_answers_say_most_often(
    rank: Ranking, capsys: pytest.CaptureFixture[str]
) -> None:
    """Several sizes at once, a head each; no question's word, no word of the template; ends always."""
    rank("heads", "20 9 3")
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 3
    counts = plain_counts()
    for size, line in zip((20, 9, 3), printed, strict=True):
        tokens = rank.load(f"heads/{size}").draft_tokens.tolist()
        assert tokens == plain_list(size)
        covered = sum(counts[token] for token in tokens) / counts.total()
        record = json.loads((rank.folder / "heads" / str(size) / "draft_vocabulary.json").read_text())
        assert record["coverage"] == pytest.approx(covered)
        assert (record["counted"], record["distinct"]) == (counts.total(), len(counts))
        assert f"{size} tokens, {100 * covered:.2f} % of the {counts.total()} counted" in line
        assert f"{100 * size / VOCAB:.1f} % of the target's {VOCAB} rows" in line
    rank("one", "9")  # of one size the folder is the head
    assert rank.load("one").draft_tokens.tolist() == plain_list(9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_weights_are_the_heads_own(rank: Ranking, dtype: torch.dtype) -> None:
    """Bit for bit, in the dtype they were stored in, with all that its config says."""
    head = exact_pair()[1]
    save_head(head, rank.folder / "theirs", {"bos_token_id": 1, "rope_scaling": None}, dtype)
    rank("ranked", "9", head="theirs")
    before, after = (
        load_file(rank.folder / name / "model.safetensors", "cpu") for name in ("theirs", "ranked")
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[key]) and value.dtype == dtype for key, value in before.items())
    configs = [json.loads((rank.folder / name / "config.json").read_text()) for name in ("theirs", "ranked")]
    assert configs[1] == configs[0] | {"draft_vocab_size": 9, "draft_text_tokens": 256}
    original, found = rank.load("theirs"), rank.load("ranked").restrict(None)
    assert found.config == original.config and found.draft_tokens is None
    assert all(torch.equal(value, found.state_dict()[key]) for key, value in original.state_dict().items())


def test_a_bin_head_with_an_embedding_gets_a_list_and_so_does_one_that_has_another(rank: Ranking) -> None:
    tensors = load_file(rank.folder / "head" / "model.safetensors")
    embedding = {"embed_tokens.weight": torch.zeros(VOCAB, WIDTH, dtype=torch.float64)}
    (rank.folder / "head" / "model.safetensors").unlink()
    torch.save({key: value.half() for key, value in tensors.items()} | embedding, rank.folder / "head/m.bin")
    rank("first", "20", head="head/m.bin")
    stored = load_file(rank.folder / "first" / "model.safetensors")
    assert all(torch.equal(value, tensors[key].half()) for key, value in stored.items())
    rank("second", "9", head="first")
    assert rank.load("second").draft_tokens.tolist() == plain_list(9)


def test_rare_tokens_are_never_drafted_and_the_text_stays(rank: Ranking) -> None:
    """With half of the text's tokens: what is drafted is in the list, tau falls, the greedy text does not."""
    rank("ranked", "8 --draft-text-tokens 0")
    prompts, target = random_tokens(4, 12), TargetModel(exact_pair()[0])
    whole = EagleFSD(target, rank.load("head")).generate(prompts, max_new_tokens=40, tree=TREE)
    engine = EagleFSD(target, rank.load("ranked"))
    made = engine.generate(prompts, max_new_tokens=40, tree=TREE)
    assert made.new_tokens == whole.new_tokens == target_texts()
    assert all(1 < few.tau < all_.tau for few, all_ in zip(made.stats, whole.stats, strict=True))
    drafter = engine.drafter.make(1, 64, TreeConfig(16, 5, 8))
    with torch.inference_mode():
        features = target.decoder(input_ids=prompts[:1]).last_hidden_state
        feed(drafter, features[:, :-1], prompts[:1, 1:], [11])
        tree = drafter.draft(prompts[0, -1:], TREE)
    drafted = set(tree.tokens[0, 1:].tolist())
    assert drafted and drafted <= set(plain_list(8))


def test_a_texts_own_tokens_are_drafted_beside_a_short_list(rank: Ranking) -> None:
    """Its text stays, tau rises; the number is in config.json, where 0 is left out."""
    rank("none", "3 --draft-text-tokens 0")
    rank("own", "3 --draft-text-tokens 30")
    assert [rank.load(name).config.draft_text_tokens for name in ("none", "own")] == [None, 30]
    prompts, target = random_tokens(4, 12), TargetModel(exact_pair()[0])
    none, own = (
        EagleFSD(target, rank.load(name)).generate(prompts, max_new_tokens=40, tree=TREE)
        for name in ("none", "own")
    )
    assert none.new_tokens == own.new_tokens == target_texts()
    assert sum(row.steps for row in own.stats) < sum(row.steps for row in none.stats)
    with ends_in_one_line(r".*draft_text_tokens is -1: .*; change --draft-text-tokens"):
        rank("wrong", "3 --draft-text-tokens -1")
    assert not (rank.folder / "wrong").exists()


def test_shards_are_counted_as_their_rows(rank: Ranking) -> None:
    """And beside rows of --data; shards of a target of another name are refused."""
    model, _ = exact_pair()
    target = hub.load_text(hub.resolve_target(str(rank.folder / "target"), weights=False))
    args = Namespace(data=[rank.folder / "rows.jsonl"], text=[], max_length=None, rows=None)
    (examples,) = read_examples(args, target.tokenizer, "x", target.max_positions).values()
    name = str(rank.folder / "target")
    for folder, who in (("shards", name), ("others", "someone")):
        identity = {"name": who, "weights": "0", "dtype": "bfloat16"}
        Extraction(model.model, identity, shard_examples=3).write({rank.folder / folder: examples})
    rank("ranked", "9", "--shards {}/shards")
    assert rank.load("ranked").draft_tokens.tolist() == plain_list(9)
    rank("both", "9", "--shards {}/shards --data {}/rows.jsonl")
    record = json.loads((rank.folder / "both" / "draft_vocabulary.json").read_text())
    assert record["counted"] == 2 * plain_counts().total()
    with ends_in_one_line(r".*another target \(target\.name was someone, now .*/target\)"):
        rank("none", "9", "--shards {}/others")
    with pytest.raises(ValueError, match=r"another target \(target\.weights was 0, now 1\)"):
        StoredFeatures([rank.folder / "shards"], {"name": name, "weights": "1"})


def test_text_counts_questions_too(rank: Ranking) -> None:
    rank("data", "9")
    rank("text", "9", "--text {}/rows.jsonl")
    data, text = (
        json.loads((rank.folder / name / "draft_vocabulary.json").read_text())["counted"]
        for name in ("data", "text")
    )
    # Of each row from its second word on: nothing that is learned stands before the first.
    questions = "w04 w04 w27 w31", "w30 w04 w27 w31"
    assert text - data == len(target_texts()) * len(" ".join(questions).split())


MISTAKES = {
    r"no data: give --data, --text or --shards": {"more": ""},
    r"draft_vocab_size is 33: it must be in 3\.\.32, .*; change --draft-vocab-size": {"sizes": "9 33"},
    r"draft_vocab_size is 2: it must be in 3\.\.32, from the target's special and end tokens": {"sizes": "2"},
    r"--output names .*/head, which exists: name a new folder": {"output": "head"},
    r"--output names .*/x, where nothing can be written": {"output": "rows.jsonl/x"},
    r".*gone: cannot be read .*; name a JSONL file": {"more": "--data {}/gone"},
    r"no feature shards in '.*gone'": {"more": "--shards {}/gone"},
    r"draft head '.*gone' is not there": {"head": "gone"},
    r"max_length is 9999: the target has 512 positions": {"more": "--data {}/rows.jsonl --max-length 9999"},
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_are_one_line_and_write_nothing(rank: Ranking, message: str) -> None:
    before = sorted(rank.folder.rglob("*"))
    with ends_in_one_line(message):
        rank(**({"output": "new", "sizes": "9"} | MISTAKES[message]))
    assert sorted(rank.folder.rglob("*")) == before


def test_a_target_of_other_sizes_or_without_a_tokenizer(rank: Ranking) -> None:
    for file in (rank.folder / "target").glob("tokenizer*"):
        file.unlink()
    with ends_in_one_line(r".*target '.*target' has no tokenizer: name a folder"):
        rank("new", "9")
    config = rank.folder / "target" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 40}))
    with ends_in_one_line(r".*vocab_size 32: the target's is 40"):
        rank("new", "9")


def test_counting_by_hand() -> None:
    """A token is counted where the position before it is learned; one that the target has not is refused."""

    class Target:
        vocab_size, eos_token_ids = 5, (4,)

    tokens, learn = torch.tensor([1, 2, 2, 3]), torch.tensor([False, True, True, True])
    found = learned_tokens([(tokens, learn), (tokens, ~learn)], Target(), LetterTokenizer())
    assert found.counts.tolist() == [0, 0, 2, 1, 0] and found.always == (4,)
    assert found.coverage(torch.tensor([2, 4])) == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match=r"the text holds token 7: the target's are 0\.\.4; name the target"):
        learned_tokens([(torch.tensor([1, 7]), torch.tensor([True, True]))], Target())
    beyond = type("Tokenizer", (), {"all_special_ids": [4, 0, 5, 99, -1]})()
    assert learned_tokens([(tokens, learn)], Target(), beyond).always == (0, 4)
