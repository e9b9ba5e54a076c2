"""`generate(custom_generate=...)` of Hugging Face through a folder on disk: its texts are generate's own."""

from __future__ import annotations

import copy
import gc
import json
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.tiny_models import VOCAB, tiny_head, tiny_model
from support.tiny_tokenizer import tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM

from eagle_fsd import Fuzzy, hub
from eagle_fsd.evaluation.serving.processes import free_port, started
from eagle_fsd.integrations.custom_generate import ENGINES, generate_with_head
from eagle_fsd.training.run.custom_generate import write_folder

FOLLOW = {"threshold": 9.0, "divergence": "reverse_kl"}  # follows the draft nearly everywhere


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("repository")
    head = hub.save_head(tiny_head(), folder / "head")
    write_folder(folder, str(head))
    return str(folder)


@pytest.fixture(autouse=True, scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Copies of remote code go to a folder of these tests."""
    folder = str(tmp_path_factory.mktemp("modules"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", folder)
        yield


def prompts(rows: int = 3) -> torch.Tensor:
    return torch.randint(4, VOCAB, (rows, 7), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_new_tokens": 16},
        {"max_length": 20, "repetition_penalty": 1.3},
        {"max_new_tokens": 16, "eos_token_id": [17, 60, 5, 8, 9, 12, 31, 66], "no_repeat_ngram_size": 2},
        {
            "max_new_tokens": 12,
            "bad_words_ids": [[17], [34]],
            "sequence_bias": {(7,): 2.5},
            "use_cache": True,
        },
        {"generation_config": transformers.GenerationConfig(max_new_tokens=9, suppress_tokens=[17, 5])},
        {"max_new_tokens": 9, "num_beams": 1, "do_sample": False, "attention_mask": torch.ones(3, 7)},
    ],
    ids=lambda one: "-".join(one),
)
def test_greedy_texts_are_those_of_generate(repository: str, arguments: dict[str, Any]) -> None:
    model = tiny_model()
    wanted = model.generate(prompts(), **arguments)
    for tree in ("8/3/3", "1/1/1"):
        made = model.generate(
            prompts(), custom_generate=repository, trust_remote_code=True, tree=tree, **arguments
        )
        assert torch.equal(made, wanted)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "own", [{"max_new_tokens": 5}, {"max_length": 15}, {"max_new_tokens": 5, "max_length": 9}]
)
@pytest.mark.parametrize("arguments", [{}, {"max_new_tokens": 3}, {"max_length": 11}])
def test_a_model_may_say_how_long_its_texts_are(
    repository: str, own: dict[str, int], arguments: dict[str, int]
) -> None:
    model, head = tiny_model(), str(Path(repository) / "head")
    model.generation_config = transformers.GenerationConfig(**own)
    for asked in (arguments, {"generation_config": transformers.GenerationConfig(**arguments)}):
        wanted = model.generate(prompts(), **asked)
        assert torch.equal(generate_with_head(model, head, prompts(), tree="8/3/3", **asked), wanted)


@pytest.mark.parametrize("own", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-3}])
def test_sampling_is_the_models_own_where_the_call_asks_for_it(
    repository: str, own: dict[str, float]
) -> None:
    model, head = tiny_model(), str(Path(repository) / "head")
    model.generation_config = transformers.GenerationConfig(**own)
    wanted = model.generate(prompts(), max_new_tokens=12)
    assert torch.equal(model.generate(prompts(), max_new_tokens=12, do_sample=True), wanted)
    asked = {"tree": "8/3/3", "max_new_tokens": 12, "do_sample": True, "seed": 3}
    assert torch.equal(generate_with_head(model, head, prompts(), **asked), wanted)
    other = generate_with_head(
        model, head, prompts(), **asked, top_k=0, top_p=1.0, min_p=0.0, temperature=2.0
    )
    assert not torch.equal(other, wanted)


ENDS = [17, 60, 5, 8, 9, 12, 31, 66]


@pytest.mark.parametrize(
    "own",
    [
        {"eos_token_id": ENDS},
        {"eos_token_id": ENDS, "min_new_tokens": 9},
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 1},
        {"suppress_tokens": ENDS},
        {"bad_words_ids": [[token] for token in ENDS]},
        {"sequence_bias": {(17,): 9.0}},
        {"do_sample": True, "temperature": 1.5},
    ],
    ids=lambda one: "-".join(one),
)
def test_none_in_a_call_turns_off_what_the_model_asks_for(repository: str, own: dict[str, Any]) -> None:
    model, head = tiny_model(), str(Path(repository) / "head")
    model.generation_config = transformers.GenerationConfig(**own)
    asked: dict[str, Any] = {"max_new_tokens": 12, "pad_token_id": 0, **dict.fromkeys(own)}
    wanted = model.generate(prompts(), **asked)
    assert torch.equal(generate_with_head(model, head, prompts(), tree="8/3/3", **asked), wanted)


PADDED: list[dict[str, Any]] = [
    {},
    {"pad_token_id": 0},
    {"pad_token_id": 94},
    {"generation_config": transformers.GenerationConfig(pad_token_id=0)},
    {"eos_token_id": 0},
    {"eos_token_id": ENDS},
    {"eos_token_id": ENDS, "pad_token_id": 0, "tokenizer": tiny_tokenizer()},
    {"pad_token_id": 0, "attention_mask": torch.ones(3, 7, dtype=torch.int64)},
]
OWN_PADDING = [{}, {"pad_token_id": 0}, {"eos_token_id": 3}, {"pad_token_id": 0, "eos_token_id": 0}]


@pytest.mark.parametrize(
    ("own", "arguments"),
    [  # each with two of the model's own in each run, and with all in the long ones
        pytest.param(own, arguments, marks=() if (number + place) % 2 == 0 else pytest.mark.slow)
        for number, own in enumerate(OWN_PADDING)
        for place, arguments in enumerate(PADDED)
    ],
    ids=lambda one: "-".join(one) or "nothing",
)
def test_padding_is_that_of_generate(repository: str, own: dict[str, Any], arguments: dict[str, Any]) -> None:
    """What counts as padding in the prompts, and what fills short rows."""
    model, padded = tiny_model(), prompts()
    padded[0, :3] = 0
    model.generation_config = transformers.GenerationConfig(**own)
    asked = {"max_new_tokens": 16, **arguments}
    wanted = model.generate(padded, **asked)
    head = str(Path(repository) / "head")
    assert torch.equal(generate_with_head(model, head, padded, tree="8/3/3", **asked), wanted)
    made = generate_with_head(model, head, padded, tree="8/3/3", return_dict_in_generate=True, **asked)
    assert torch.equal(made.sequences, wanted)


def test_stop_strings_end_texts_as_in_generate(repository: str) -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    whole = tokenizer.decode(model.generate(prompts(1), max_new_tokens=20)[0, 7:])
    end = {"stop_strings": [whole[4:7]], "tokenizer": tokenizer, "max_new_tokens": 20}
    made = model.generate(prompts(1), custom_generate=repository, trust_remote_code=True, tree="8/3/3", **end)
    assert torch.equal(made, model.generate(prompts(1), **end)) and made.shape[1] < 27


@pytest.mark.parametrize("kind", ["special token", "leading space"])
def test_stop_strings_that_depend_on_the_tokenizer_end_texts_as_in_generate(
    repository: str, kind: str
) -> None:
    """Special tokens have no text, and in Llama's vocabularies a token's space is lost at the beginning."""
    model = tiny_model()
    whole = model.generate(prompts(1), max_new_tokens=20)[0, 7:].tolist()
    if kind == "special token":
        tokenizer, stop, place = tiny_tokenizer(special=whole[4]), "<stop>", whole.index(whole[4])
    else:
        tokenizer, place = metaspace_tokenizer(whole[0]), 0
        stop = tokenizer.convert_ids_to_tokens(whole[0]).replace("\u2581", " ")
        assert stop.startswith(" ")
    end = {"stop_strings": [stop], "tokenizer": tokenizer, "max_new_tokens": 20}
    made = model.generate(prompts(1), custom_generate=repository, trust_remote_code=True, tree="8/3/3", **end)
    assert torch.equal(made, model.generate(prompts(1), **end)) and made.shape[1] == 8 + place


def metaspace_tokenizer(begins_with_a_space: int) -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer as Llama's: one character a token, but one with a space before its character."""
    tokens = ["<unk>", "\u2581", *(chr(33 + place) for place in range(VOCAB - 2))]
    tokens[begins_with_a_space] = "\u2581" + tokens[begins_with_a_space]
    inner = Tokenizer(models.BPE({token: place for place, token in enumerate(tokens)}, [], unk_token="<unk>"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


def test_engines_follow_their_model_and_the_heads_files(tmp_path: Path) -> None:
    model, folder = tiny_model(), hub.save_head(tiny_head(), tmp_path / "head")
    options = {"max_new_tokens": 8, "tree": "8/3/3", "return_dict_in_generate": True}
    first = generate_with_head(model, str(folder), prompts(1), **options)
    engine = model.__dict__[ENGINES][str(folder)][1]
    generate_with_head(model, str(folder), prompts(1), **options)
    assert model.__dict__[ENGINES][str(folder)][1] is engine
    model.double()
    again = generate_with_head(model, str(folder), prompts(1), **options)
    assert again.new_tokens == first.new_tokens
    engine = model.__dict__[ENGINES][str(folder)][1]
    assert engine.dtype == torch.float64
    hub.save_head(tiny_head(seed=9), folder)
    generate_with_head(model, str(folder), prompts(1), **options)
    assert model.__dict__[ENGINES][str(folder)][1] is not engine and len(model.__dict__[ENGINES]) == 1
    copied = copy.deepcopy(model)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    for other in (copied, loaded):
        assert not other.__dict__[ENGINES]
        assert generate_with_head(other, str(folder), prompts(1), **options).new_tokens == first.new_tokens
        assert copy.deepcopy(other).__dict__[ENGINES] == {}
    assert len(model.__dict__[ENGINES]) == 1


class Negated(torch.nn.Module):
    """What a layer gives, with the other sign: a layer in another's place, as an adapter puts it there."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return -self.inner(hidden)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp", "model.norm"])
def test_engines_follow_modules_that_are_exchanged(repository: str, name: str) -> None:
    model, head = tiny_model(), str(Path(repository) / "head")
    before = generate_with_head(model, head, prompts(), tree="8/3/3", max_new_tokens=12)
    model.set_submodule(name, Negated(model.get_submodule(name)))
    wanted = model.generate(prompts(), max_new_tokens=12)
    assert not torch.equal(wanted, before)
    assert torch.equal(generate_with_head(model, head, prompts(), tree="8/3/3", max_new_tokens=12), wanted)


def test_what_asks_for_nothing_is_taken_whatever_its_class(tmp_path: Path) -> None:
    model, folder = tiny_model(), hub.save_head(tiny_head(), tmp_path / "head")
    nothing = {"stopping_criteria": transformers.StoppingCriteriaList(), "typical_p": 1, "num_beams": 1}
    generate_with_head(model, str(folder), prompts(1), max_new_tokens=2, **nothing)
    for name, value in (("num_beams", True), ("use_cache", 1), ("typical_p", 0.9)):
        with pytest.raises(ValueError, match=f"{name} is {value}"):
            generate_with_head(model, str(folder), prompts(1), max_new_tokens=2, **{name: value})


def test_sampling_rules_and_statistics(repository: str) -> None:
    model = tiny_model()
    shared = {"custom_generate": repository, "trust_remote_code": True, "max_new_tokens": 16, "seed": 3}
    shared |= {"return_dict_in_generate": True, "do_sample": True}
    fuzzy = model.generate(prompts(), threshold=9.0, divergence="reverse_kl", **shared)
    assert fuzzy.rule == Fuzzy(9.0, "reverse_kl") and sum(row.fuzzy_accepts for row in fuzzy.stats) > 0
    assert fuzzy.seed == 3 and fuzzy.sequences.shape[0] == 3
    exact = model.generate(prompts(), **shared)
    assert exact.rule.threshold == 0 and exact.new_tokens != fuzzy.new_tokens
    several = model.generate(prompts(1), num_return_sequences=4, temperature=1.3, **shared)
    assert several.sequences.shape[0] == 4
    model.generation_config.num_return_sequences = 4
    assert torch.equal(model.generate(prompts(1), temperature=1.3, **shared).sequences, several.sequences)
    model.generation_config.num_return_sequences = None
    assert model.generate(prompts(1), rule="typical", **shared).rule.epsilon == 0.3
    looked_up = model.generate(prompts(1), ea_model="none", **shared)
    assert looked_up.stats[0].sources["head"] == 0


def test_the_model_goes_with_its_engines(repository: str) -> None:
    model = tiny_model()
    model.generate(prompts(1), custom_generate=repository, trust_remote_code=True, max_new_tokens=2)
    assert list(model.__dict__[ENGINES]) == [str(Path(repository) / "head")]
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_target_with_the_folder_decodes_so_by_itself(repository: str, tmp_path: Path) -> None:
    """Hugging Face puts the folder of a model's own repository in the place of its generate."""
    tiny_model().save_pretrained(tmp_path / "target")
    write_folder(tmp_path / "target", str(Path(repository) / "head"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target", trust_remote_code=True)
    made = model.generate(inputs=prompts(), max_new_tokens=9, return_dict_in_generate=True)
    assert made.stats[0].steps > 0
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    assert torch.equal(made.sequences, plain.generate(prompts(), max_new_tokens=9))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"num_beams": 4}, "num_beams is 4: eagle_fsd does not do that"),
        ({"output_scores": True}, "output_scores is True"),
        ({"penalty_alpha": 0.6}, "penalty_alpha is 0.6"),
        ({"assistant_model": "x"}, "assistant_model is 'x'"),
        ({"rule": "typical", "threshold": 0.3}, "threshold and divergence belong to the rule fuzzy"),
        ({"tree": "16"}, "tree is '16'"),
        ({"input_ids": None}, "input_ids is missing"),
        ({"max_length": 7}, "max_length is 7: the prompt has 7 tokens"),
        ({"ea_model": "/not/there"}, "/not/there"),
    ],
)
def test_what_is_not_done_is_named(repository: str, arguments: dict[str, Any], named: str) -> None:
    given = {"ea_model": str(Path(repository) / "head"), "input_ids": prompts(1), **arguments}
    with pytest.raises(ValueError, match=named):
        generate_with_head(tiny_model(), **given)


@pytest.mark.slow
def test_transformers_serve_decodes_through_a_repositorys_folder(tmp_path: Path) -> None:
    """A served model whose repository has the folder: its texts, and a threshold for one request."""
    for needed in ("fastapi", "uvicorn", "openai", "pydantic"):
        pytest.importorskip(needed, reason='this needs: pip install "transformers[serving]"')
    repository, model, tokenizer = tmp_path / "served", tiny_model(), tiny_tokenizer()
    model.save_pretrained(repository)
    tokenizer.save_pretrained(repository)
    write_folder(repository, str(hub.save_head(tiny_head(), tmp_path / "head")))
    port = free_port()
    program = (sys.executable, "-m", "transformers.cli.transformers", "serve", str(repository))
    flags = ("--trust-remote-code", "--device", "cpu", "--dtype", "float32")
    where = ("--host", "127.0.0.1", "--port", str(port))
    environment = {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules")}
    asked = {
        "model": str(repository),
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 24,
        "temperature": 0,
    }
    encoded = tokenizer.apply_chat_template(asked["messages"], add_generation_prompt=True, return_dict=True)
    prompt = torch.tensor([encoded["input_ids"]])
    texts = [
        tokenizer.decode(made[0, prompt.shape[1] :], skip_special_tokens=True)
        for made in (
            model.generate(prompt, max_new_tokens=24, do_sample=False),
            generate_with_head(model, str(tmp_path / "head"), prompt, max_new_tokens=24, **FOLLOW),
        )
    ]
    assert texts[0] != texts[1]

    def text(server: Any, **more: str) -> str:
        reply = server.client.post("/v1/chat/completions", {**asked, **more})
        return reply.data()["choices"][0]["message"]["content"]

    with started((*program, *flags, *where), port, "/health", tmp_path / "log", environment) as server:
        assert text(server) == texts[0]
        assert text(server, generation_config=json.dumps(FOLLOW)) == texts[1]
