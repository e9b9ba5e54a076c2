"""The lm-evaluation-harness adapter: what its arguments mean, and runs through lm-eval itself.

What needs lm-eval (pip install 'eagle-fsd[harness]') is skipped where it is not installed.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import runpy
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.slow_twins import cut
from support.tiny_models import greedy_alone, tiny_head, tiny_model
from support.tiny_tokenizer import tiny_tokenizer

from eagle_fsd.acceptance.fuzzy import Fuzzy
from eagle_fsd.acceptance.other_rules import Cactus
from eagle_fsd.acceptance.rule_names import RULES, describe
from eagle_fsd.core.config import AutoTree, SamplingConfig, TreeConfig
from eagle_fsd.decoding.steps.failures import NonFiniteLogits
from eagle_fsd.engine import EagleFSD
from eagle_fsd.hub import save_head
from eagle_fsd.integrations.lm_eval.requests import ending_of, seeds, settings_of
from eagle_fsd.target.model import TargetModel

ROOT = Path(__file__).parents[2]
LENGTH = 20
QUESTIONS = ("What is it?", "Who", "Why is the sky blue?", "A long question, with commas.", "No")

needs_lm_eval = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None,
    reason="lm-eval is not installed: pip install 'eagle-fsd[harness]'",
)


@functools.cache
def engine() -> EagleFSD:
    return EagleFSD(TargetModel(tiny_model()), tiny_head(), tiny_tokenizer(), "tiny/target", "tiny/head")


@functools.cache
def greedy_texts(chat: bool = False) -> list[str]:
    """What Hugging Face's own greedy `generate` says to the questions."""
    tokenizer = engine().tokenizer
    prompts = [tokenizer(question)["input_ids"] for question in QUESTIONS]
    if chat:
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
            )
            for question in QUESTIONS
        ]
    texts = greedy_alone(engine().target.model, prompts, LENGTH)
    return [tokenizer.decode(text, skip_special_tokens=True) for text in texts]


def until(chat: bool = False) -> list[str]:
    """Stop strings that cut some of the greedy texts."""
    texts = greedy_texts(chat)
    return [texts[0][5:7], texts[3][9:10]]


def lm(**arguments: Any) -> Any:
    from eagle_fsd.integrations.lm_eval.model import EagleLM

    return EagleLM(engine(), **arguments)


def requests_of(contexts: Sequence[str], gen_kwargs: dict[str, Any]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [
        Instance("generate_until", {}, (context, dict(gen_kwargs)), place, ("tiny", place, 1))
        for place, context in enumerate(contexts)
    ]


# --- --model_args ---


def test_the_models_arguments_are_those_of_the_engine_the_rule_and_the_tree() -> None:
    settings = settings_of(
        {
            "base_model": "m",
            "ea_model": "h",
            "dtype": "float32",
            "device": "cpu",
            "pack": False,
            "runtime": "openvino",
            "weight_format": "packed",
            "lookup": True,
            "draft_layers": 3,
            "threshold": 0.3,
            "divergence": "tv",
            "mode": "paper",
            "child": "target",
            "min_p": 0.1,
            "max_consecutive": 2,
            "total_tokens": 20,
            "depth": 4,
            "top_k": 6,
            "batch_size": "4",
            "max_gen_toks": 99,
            "seed": 3,
        }
    )
    assert settings.models == {
        "base_model": "m",
        "ea_model": "h",
        "dtype": "float32",
        "device": "cpu",
        "pack": False,
        "runtime": "openvino",
        "weight_format": "packed",
        "lookup": True,
        "draft_layers": 3,
    }
    assert settings.rule == Fuzzy(0.3, "tv", "paper", "target", min_p=0.1, max_consecutive=2)
    assert settings.tree == TreeConfig(20, 4, 6)
    assert (settings.batch_size, settings.max_gen_toks, settings.seed) == (4, 99, 3)


def test_without_arguments_it_is_the_default_model_lossless_and_alone() -> None:
    settings = settings_of({"ea_model": None})
    assert settings.models == {"base_model": "smollm2-135m"}
    assert settings.rule == Fuzzy(threshold=0.0) and settings.tree == TreeConfig()
    assert settings.batch_size == 1


def test_any_rule_may_be_named_in_a_word() -> None:
    assert settings_of({"rule": "cactus:0.1"}).rule == Cactus(0.1)
    assert settings_of({"rule": "js:0.3:paper"}).rule == Fuzzy(0.3, mode="paper")
    with pytest.raises(ValueError, match="rule is 'cactus' beside threshold: it says all"):
        settings_of({"rule": "cactus", "threshold": 0.3})
    with pytest.raises(ValueError, match="rule is 'fast'"):
        settings_of({"rule": "fast"})


def test_a_tree_may_be_measured() -> None:
    assert settings_of({"total_tokens": "auto"}).tree == AutoTree()
    assert settings_of({"total_tokens": "auto", "depth": 3, "top_k": None}).tree == AutoTree(depth=3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"treshold": 0.3}, r"model_args has 'treshold': eagle_fsd takes base_model, .*; check its spelling"),
        ({"temperature": 0.6}, "model_args has 'temperature'"),
        ({"threshold": -1}, "threshold is -1"),
        ({"threshold": "x"}, "threshold is 'x'"),
        ({"divergence": "kl"}, "divergence is 'kl': it must be one of reverse_kl"),
        ({"child": "best"}, "child is 'best'"),
        ({"total_tokens": 60, "depth": 1}, "total_tokens is 60"),
        ({"total_tokens": "many"}, "total_tokens is 'many'"),
        ({"total_tokens": "auto", "depth": 0}, "depth is 0"),
        ({"pack": "no"}, "pack is 'no': it must be true or false"),
        ({"batch_size": "auto"}, "batch_size is 'auto'.*there is no automatic choice; give a number"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"max_gen_toks": 0}, "max_gen_toks is 0"),
        (
            {"mode": "paper", "child": None},
            "mode is 'paper' without a threshold above 0: nothing is followed",
        ),
        ({"threshold": 0, "price": 2}, "price is 2 without a threshold above 0: .*give a threshold, inf for"),
    ],
)
def test_wrong_arguments_of_the_model(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings_of(arguments)


# --- --gen_kwargs ---


@pytest.mark.parametrize(
    ("gen_kwargs", "sampling"),
    [
        ({}, SamplingConfig()),
        ({"do_sample": False, "temperature": 0.0}, SamplingConfig()),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.9}, SamplingConfig()),
        ({"do_sample": True}, SamplingConfig(1.0)),
        ({"do_sample": True, "temperature": 0, "top_k": 5}, SamplingConfig()),
        ({"temperature": 0.7}, SamplingConfig(0.7)),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 50, "top_p": 0.9},
            SamplingConfig(0.6, 50, 0.9),
        ),
        ({"num_beams": 1, "temperature": None}, SamplingConfig()),
    ],
)
def test_sampling_as_lm_eval_means_it(gen_kwargs: dict[str, Any], sampling: SamplingConfig) -> None:
    assert ending_of(gen_kwargs, 7).sampling == sampling


def test_lengths_and_stop_strings() -> None:
    ending = ending_of({"until": "a"}, 7)
    assert (ending.until, ending.max_new_tokens) == (("a",), 7)
    ending = ending_of({"until": ["a", "b"], "max_new_tokens": 9}, 7)
    assert (ending.until, ending.max_new_tokens) == (("a", "b"), 9)
    assert ending_of({"max_new_tokens": 9, "max_gen_toks": 8}, 7).max_new_tokens == 8


@pytest.mark.parametrize(
    ("gen_kwargs", "message"),
    [
        ({"num_beams": 4}, r"gen_kwargs has num_beams=4: eagle_fsd takes until, .*; leave it out, or change"),
        ({"repetition_penalty": 1.2}, "gen_kwargs has repetition_penalty=1.2"),
        ({"do_sample": "yes"}, "do_sample is 'yes'"),
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"do_sample": True, "top_p": 0}, "top_p is 0"),
        ({"until": 3}, "until is 3"),
        ({"until": ["a", 3]}, "until is"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_gen_toks": "long"}, "max_gen_toks is 'long'"),
    ],
)
def test_wrong_arguments_of_a_generation(gen_kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ending_of(gen_kwargs, 7)


def test_a_seed_depends_on_its_request_alone() -> None:
    one, two = ("a", {"temperature": 1, "until": ["x"]}), ("b", {"temperature": 1})
    first = seeds(0, [one, two, one, one])
    assert len(set(first)) == 4 and all(0 <= seed < 2**63 for seed in first)
    assert seeds(0, [two, one, one]) == [first[1], first[0], first[2]]
    assert not set(seeds(1, [one, two])) & set(first)


# --- the model ---


def test_without_lm_eval_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lm_eval", "lm_eval.models"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "eagle_fsd.integrations.lm_eval.model", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'eagle-fsd\[harness\]'"):
        importlib.import_module("eagle_fsd.integrations.lm_eval.model")


@needs_lm_eval
@pytest.mark.parametrize("batch_size", [1, 3])
def test_lossless_answers_in_the_requests_order(batch_size: int) -> None:
    model = lm(batch_size=batch_size)
    gen_kwargs = {"until": until(), "max_gen_toks": LENGTH, "do_sample": False}
    found = model.generate_until(requests_of(QUESTIONS, gen_kwargs), disable_tqdm=True)
    assert found == [cut(text, until()) for text in greedy_texts()]
    assert len(set(found)) == len(QUESTIONS) and found != greedy_texts()
    assert model.answers == len(QUESTIONS) and 0 < model.capped < len(QUESTIONS)
    assert model.stats.new_tokens >= sum(map(len, found)) and model.stats.fuzzy_accepts == 0


@needs_lm_eval
def test_a_chat_is_tokenized_as_the_template_does() -> None:
    """The template writes the begin token, and the tokenizer adds no second."""
    model = lm()
    chats = [model.apply_chat_template([{"role": "user", "content": question}]) for question in QUESTIONS]
    found = model.generate_until(requests_of(chats, {"until": until(True), "max_gen_toks": LENGTH}), True)
    assert found == [cut(text, until(True)) for text in greedy_texts(chat=True)]
    assert model.chat_template(True) == model.tokenizer.chat_template
    assert model.chat_template(False) is None
    begun = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "It is"}]
    assert model.apply_chat_template(begun, add_generation_prompt=False).endswith("assistant: It is")
    with pytest.raises(ValueError, match="chat template 'tools' is not there"):
        model.chat_template("tools")


@needs_lm_eval
def test_draws_depend_on_the_request_and_the_seed_alone() -> None:
    gen_kwargs = {"temperature": 0.9, "max_gen_toks": LENGTH}

    def texts(contexts: Sequence[str], **arguments: Any) -> list[str]:
        return lm(threshold=0.6, **arguments).generate_until(requests_of(contexts, gen_kwargs), True)

    once = texts(QUESTIONS)
    assert texts(QUESTIONS[::-1], batch_size=3) == once[::-1]
    assert texts(QUESTIONS[:2], seed=1) != once[:2]
    twice = texts([QUESTIONS[0]] * 2)
    assert twice[0] == once[0] != twice[1]


@needs_lm_eval
def test_every_answer_is_given_to_the_cache() -> None:
    model, kept = lm(batch_size=2), []

    class Hook:
        def add_partial(self, *entry: Any) -> None:
            kept.append(entry)

    model.set_cache_hook(Hook())
    requests = requests_of(QUESTIONS, {"max_gen_toks": LENGTH, "until": "."})
    found = model.generate_until(requests, disable_tqdm=True)
    assert sorted(kept, key=repr) == sorted(
        (
            ("generate_until", request.args, text)
            for request, text in zip(requests, found, strict=True)
        ),
        key=repr,
    )  # fmt: skip


@needs_lm_eval
def test_stats_are_summed_shown_and_put_beside_lm_evals_results(caplog: pytest.LogCaptureFixture) -> None:
    model = lm(threshold=5.0, total_tokens=8, depth=3, top_k=4)
    requests = requests_of(QUESTIONS, {"max_gen_toks": LENGTH})
    with caplog.at_level(logging.INFO, logger="eagle_fsd"):
        for calls in (1, 2):
            model.generate_until(requests, disable_tqdm=True)
            assert (model.answers, model.stats.new_tokens) == (calls * 5, calls * 5 * LENGTH)
    stats = model.stats
    assert stats.fuzzy_accepts > 0 and stats.steps + stats.fuzzy_accepts + stats.exact_accepts >= 200
    assert "tree 8/3/4: 10 answers, 200 tokens, tau" in caplog.messages[-1]
    assert f"{stats.fuzzy_accepts} fuzzy accepts, 10 answers cut at their length" in caplog.messages[-1]
    info = json.loads(json.dumps(model.get_model_info(), allow_nan=False))
    assert (info["base_model"], info["ea_model"], info["tree"]) == ("tiny/target", "tiny/head", "8/3/4")
    assert info["rule"]["threshold"] == 5.0 and info["rule"]["max_overshoot"] == "inf"
    assert info["stats"]["tau"] == stats.tau and info["capped"] == 10
    assert (model.tokenizer_name, model.rank, model.world_size) == ("tiny__target", 0, 1)


@needs_lm_eval
def test_long_prompts_are_cut_on_the_left_and_empty_ones_begun(caplog: pytest.LogCaptureFixture) -> None:
    """Of 256 positions 20 are the answer's."""
    model = lm()
    long = "x" * 50 + "abc" * 100
    kept = greedy_alone(engine().target.model, [engine().tokenizer(long)["input_ids"][-236:], [1]], LENGTH)
    found = model.generate_until(requests_of([long, ""], {"max_gen_toks": LENGTH}), disable_tqdm=True)
    assert found == [model.tokenizer.decode(text, skip_special_tokens=True) for text in kept]
    assert "1 prompts leave too little room" in caplog.text
    with pytest.raises(ValueError, match="max_gen_toks is 256: the target has 256 positions"):
        model.generate_until(requests_of(["a"], {"max_gen_toks": 256}), disable_tqdm=True)


@needs_lm_eval
def test_nothing_is_answered_where_one_request_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EagleFSD, "generate_many", lambda *_, **__: pytest.fail("it was answered"))
    requests = requests_of(["a"], {"max_gen_toks": 5}) + requests_of(["b"], {"num_beams": 4})
    with pytest.raises(ValueError, match="num_beams=4"):
        lm().generate_until(requests)


@needs_lm_eval
def test_scores_of_given_text_are_refused() -> None:
    requests = requests_of(["a"], {})
    for method in (lm().loglikelihood, lm().loglikelihood_rolling):
        with pytest.raises(NotImplementedError, match=r"^tiny scores given text.*generate_until: gsm8k"):
            method(requests)


@needs_lm_eval
def test_a_target_needs_a_tokenizer() -> None:
    from eagle_fsd.integrations.lm_eval.model import EagleLM

    with pytest.raises(ValueError, match="the target has no tokenizer"):
        EagleLM(EagleFSD(engine().target, engine().head))


@needs_lm_eval
def test_lm_evals_flags_yield_to_the_models_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its command line always names a batch size, and a device that may not be there."""
    import torch

    from eagle_fsd.integrations.lm_eval.model import EagleLM

    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(EagleFSD, "from_pretrained", lambda **options: (seen.append(options), engine())[1])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    flags = {"batch_size": "2", "device": "cuda:0", "max_batch_size": None}
    model = EagleLM.create_from_arg_string("threshold=0.5,base_model=m", flags)
    assert (model.settings.rule, model.batch_size) == (Fuzzy(0.5), 2)
    model = EagleLM.create_from_arg_obj({"batch_size": 3, "device": "cpu"}, flags)
    assert model.batch_size == 3
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    EagleLM.create_from_arg_obj({"base_model": "m"}, flags)
    EagleLM.create_from_arg_obj({"device_map": "auto"}, flags)
    assert seen == [
        {"base_model": "m"},
        {"base_model": "smollm2-135m", "device": "cpu"},
        {"base_model": "m", "device": "cuda:0"},
        {"base_model": "smollm2-135m", "device_map": "auto"},
    ]


# --- through lm-eval ---


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A generative task of one's own: a YAML file and its questions; one of the expected answers is wrong."""
    import datasets
    import yaml

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    answers = [cut(text, until()) for text in greedy_texts()]
    answers[2] += "!"
    rows = [
        {"question": question, "answer": answer}
        for question, answer in zip(QUESTIONS, answers, strict=True)
    ]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "task": "tiny_questions",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": until(), "max_gen_toks": LENGTH, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    (tmp_path / "tiny_questions.yaml").write_text(yaml.safe_dump(config))
    return tmp_path / "tiny_questions.yaml"


@pytest.fixture
def few_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval without its thousands of tasks, which take seconds to read."""
    import lm_eval.tasks

    monkeypatch.setattr(
        lm_eval.tasks, "TaskManager", functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
    )


@needs_lm_eval
def test_a_task_of_ones_own_from_end_to_end(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import yaml
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    def evaluate(model: Any) -> dict[str, Any]:
        return simple_evaluate(
            model,
            tasks=[yaml.safe_load(task.read_text())],
            task_manager=TaskManager(include_defaults=False),
            use_cache=str(tmp_path / "answers"),
            bootstrap_iters=0,
        )

    results = evaluate(lm(batch_size=2))
    assert results["results"]["tiny_questions"]["exact_match,none"] == pytest.approx(4 / 5)
    said = [sample["filtered_resps"][0] for sample in results["samples"]["tiny_questions"]]
    assert said == [cut(text, until()) for text in greedy_texts()]
    assert results["config"]["stats"]["new_tokens"] > 0 and results["config"]["answers"] == 5
    monkeypatch.setattr(EagleFSD, "generate_many", lambda *_, **__: pytest.fail("it was answered again"))
    again = evaluate(lm())
    assert again["results"] == results["results"]


@pytest.fixture
def command(
    few_tasks: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs eval/harness.py: its exit code, stdout and stderr. lm-eval's own logging stays out of it."""
    import lm_eval.utils

    monkeypatch.setattr(lm_eval.utils, "_LOGGING_CONFIGURED", True, raising=False)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    level = logging.getLogger("eagle_fsd").level

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["harness.py", *arguments])
        code = 0
        try:
            runpy.run_path(str(ROOT / "eval" / "harness.py"), run_name="__main__")
        except SystemExit as error:
            code = error.code
        finally:
            logging.getLogger("eagle_fsd").setLevel(level)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def models(tmp_path: Path) -> str:
    """A target and a head on disk, as --model_args name them."""
    model = tiny_model()
    model.generation_config = type(model.generation_config)()
    model.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    save_head(tiny_head(), tmp_path / "head")
    return f"base_model={tmp_path / 'target'},ea_model={tmp_path / 'head'},dtype=float32,device=cpu"


@needs_lm_eval
def test_the_command_from_end_to_end(
    task: Path, models: str, tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    out = tmp_path / "out"
    code, shown, _ = command(
        *("--model", "eagle_fsd", "--model_args", f"{models},threshold=0,total_tokens=8,depth=3,top_k=4"),
        *("--tasks", str(task), "--batch_size", "2", "--output_path", str(out), "--log_samples"),
    )
    assert code == 0 and "|exact_match|" in shown and "|  0.8|" in shown
    (results,) = [json.loads(path.read_text()) for path in out.rglob("results*.json")]
    config = results["config"]
    assert (config["tree"], config["rule"]["threshold"], config["answers"]) == ("8/3/4", 0, 5)
    assert config["stats"]["tau"] > 1
    (samples,) = [path.read_text().splitlines() for path in out.rglob("samples*.jsonl")]
    said = {row["doc"]["question"]: row["filtered_resps"][0] for row in map(json.loads, samples)}
    assert said == {q: cut(text, until()) for q, text in zip(QUESTIONS, greedy_texts(), strict=True)}


@needs_lm_eval
def test_the_documented_commands_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the script and of the docs: lm-eval parses them, and so do we."""
    from lm_eval._cli import HarnessCLI

    commands = []
    for path in ("eagle_fsd/integrations/lm_eval/command.py", "docs/quality.md"):
        text = (ROOT / path).read_text(encoding="utf-8").replace("\\\\\n", " ").replace("\\\n", " ")
        lines = [line.strip() for line in text.splitlines()]
        commands += [line for line in lines if line.startswith("python eval/harness.py ")]
    assert len(commands) >= 4
    for line in commands:
        monkeypatch.setattr(sys, "argv", shlex.split(line)[1:])
        parsed = HarnessCLI().parse_args()
        assert parsed.model == "eagle_fsd" and parsed.tasks
        assert describe(settings_of(parsed.model_args or {}).rule)["name"] in RULES
        assert ending_of(parsed.gen_kwargs or {}, 7).max_new_tokens >= 7


@needs_lm_eval
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model_args", "treshold=0.3"], "model_args has 'treshold'"),
        (["--model_args", "threshold=-1"], "threshold is -1"),
        (["--model_args", "base_model=/nowhere/at/all"], "target '/nowhere/at/all' is not there"),
        (["--model_args", "{models},batch_size=auto"], "batch_size is 'auto'"),
        (["--model_args", "{models}", "--gen_kwargs", "num_beams=4"], "gen_kwargs has num_beams=4"),
        (["--model_args", "{models}", "--gen_kwargs", "max_gen_toks=0"], "max_gen_toks is 0"),
        (["--tasks", "no_such_task"], "Tasks not found: no_such_task"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str],
    message: str,
    task: Path,
    models: str,
    command: Callable[..., tuple[int, str, str]],
) -> None:
    given = [argument.replace("{models}", models) for argument in arguments]
    code, _, shown = command("--model", "eagle_fsd", "--tasks", str(task), *given)
    assert code == 2
    (line,) = [line for line in shown.splitlines() if "error" in line.lower()]
    assert line.startswith("harness.py: error: ") and message in line
    assert "Traceback" not in shown


@needs_lm_eval
def test_a_task_of_scores_is_one_line(
    task: Path, models: str, command: Callable[..., tuple[int, str, str]]
) -> None:
    import yaml

    config = yaml.safe_load(task.read_text())
    del config["generation_kwargs"], config["metric_list"]
    task.write_text(yaml.safe_dump(config | {"output_type": "loglikelihood"}))
    code, _, shown = command("--model", "eagle_fsd", "--model_args", models, "--tasks", str(task))
    assert code == 2
    assert "harness.py: error: tiny_questions scores given text" in shown.splitlines()[-1]


def test_the_command_without_lm_eval(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("lm_eval", "lm_eval.models"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "eagle_fsd.integrations.lm_eval.model", raising=False)
    monkeypatch.setattr(sys, "argv", ["harness.py", "--tasks", "gsm8k"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(ROOT / "eval" / "harness.py"), run_name="__main__")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("harness.py: error: lm-eval is not installed") and "eagle-fsd[harness]" in line
    monkeypatch.setattr(sys, "argv", ["harness.py", "--help"])
    runpy.run_path(str(ROOT / "eval" / "harness.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert "--model_args threshold=0.3 --tasks gsm8k" in shown and "pip install 'eagle-fsd[harness]'" in shown


def test_logits_that_are_not_finite_end_the_command_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def evaluate() -> None:
        raise NonFiniteLogits(3, 0)

    stand_ins = {"lm_eval": {}, "lm_eval.__main__": {"cli_evaluate": evaluate}}
    for name, held in {**stand_ins, "eagle_fsd.integrations.lm_eval.model": {}}.items():
        module = ModuleType(name)
        vars(module).update(held)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sys, "argv", ["harness.py"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(ROOT / "eval" / "harness.py"), run_name="__main__")
    assert "harness.py: error: step 3 of row 0: the target's" in capsys.readouterr().err.splitlines()[-1]
