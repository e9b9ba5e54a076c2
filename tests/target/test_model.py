"""The target adapter on every supported architecture: tiny models against their own `generate`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.drafters import feed
from support.stubs import generator
from support.tiny_models import (
    EAGER_ONLY,
    HIDDEN,
    VOCAB,
    WINDOW,
    KnowingEngine,
    greedy_alone,
    prompts_of,
    tiny_head,
    tiny_model,
)

from eagle_fsd import EagleFSD, Lossless, TreeConfig
from eagle_fsd.core.padding import pad_left
from eagle_fsd.core.tree import DraftTree, additive
from eagle_fsd.hub import save_head
from eagle_fsd.target import model as target_module
from eagle_fsd.target.admission.small_tree import difference_of_logits
from eagle_fsd.target.architecture import (
    CHUNKED,
    NARROWED,
    SLIDING,
    cache_argument,
    check_supported,
    longest_text,
)
from eagle_fsd.target.model import TargetModel
from eagle_fsd.target.session import TargetSession

NEW_TOKENS = 20
LENGTHS = (3, 2 * WINDOW + 1, WINDOW + 2)  # shorter and longer than the window, and all end beyond it
SDPA = (
    *("llama", "qwen2", "qwen2-window", "qwen3", "mistral", "gemma3", "phi3", "phi3-window", "olmo2"),
    *("gpt2", "gpt_neox", "mixtral", "qwen3_moe", "granite", "cohere", "deepseek_v3"),
)
ARCHITECTURES = [(family, "sdpa") for family in SDPA] + [(family, "eager") for family in (*SDPA, *EAGER_ONLY)]
TREE = TreeConfig(16, 5, 3)

every_architecture = pytest.mark.parametrize(("family", "attention"), ARCHITECTURES)
# With one attention each; with both a batch with a strong drafter, and all in the long runs.
every_family = pytest.mark.parametrize(
    ("family", "attention"),
    [
        pytest.param(*one, marks=pytest.mark.slow if one[1] == "eager" and one[0] in SDPA else ())
        for one in ARCHITECTURES
    ],
)


@functools.cache
def target_of(family: str, attention: str = "sdpa") -> TargetModel:
    return TargetModel(tiny_model(family, attention))


@functools.cache
def references(family: str, attention: str) -> list[list[int]]:
    return greedy_alone(target_of(family, attention).model, prompts_of(LENGTHS), NEW_TOKENS)


# --- T = 0 at temperature 0 gives the target's own greedy text ---


@every_family
def test_single_prompts_with_a_strong_drafter_equal_generate(family: str, attention: str) -> None:
    target, wanted = target_of(family, attention), references(family, attention)
    assert len({token for text in wanted for token in text}) > 6, "a degenerate model proves nothing"
    for prompt, text in zip(prompts_of(LENGTHS), wanted, strict=True):
        engine = KnowingEngine(target, [text], seed=len(prompt))
        out = engine.generate([prompt], max_new_tokens=NEW_TOKENS, rule=Lossless(), tree=TREE)
        assert out.new_tokens == [text]
        assert out.stats[0].tau > 2


@every_architecture
def test_a_left_padded_batch_with_a_strong_drafter_equals_generate(family: str, attention: str) -> None:
    ids, mask = pad_left(prompts_of(LENGTHS), pad=0)
    engine = KnowingEngine(target_of(family, attention), references(family, attention))
    out = engine.generate(ids, mask, max_new_tokens=NEW_TOKENS, rule=Lossless(), tree=TREE)
    assert out.new_tokens == references(family, attention)
    assert all(stats.tau > 2 for stats in out.stats)


@every_family
def test_a_left_padded_batch_with_a_random_head_equals_generate(family: str, attention: str) -> None:
    ids, mask = pad_left(prompts_of(LENGTHS), pad=0)
    engine = EagleFSD(target_of(family, attention), tiny_head())
    out = engine.generate(ids, mask, max_new_tokens=NEW_TOKENS, tree=TreeConfig(40, 4, 8))
    assert out.new_tokens == references(family, attention)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_the_cached_text_is_the_text_without_a_cache(family: str) -> None:
    """Hugging Face's own cache has windows too: the plain forward is the judge of both."""
    model = target_of(family).model
    ids = torch.tensor([prompts_of(LENGTHS)[1]])
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        use_cache=False,
    )
    assert made[0, ids.shape[1] :].tolist() == references(family, "sdpa")[1]


def test_windows_matter_in_these_tests() -> None:
    """Without its window the sliding model says something else, so that the tests above do test windows."""
    wide = tiny_model("mistral", sliding_window=None)
    assert greedy_alone(wide, prompts_of(LENGTHS), NEW_TOKENS) != references("mistral", "sdpa")


def test_bfloat16_follows_the_targets_choice_within_rounding() -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    target = TargetModel(model)
    prompts = prompts_of(LENGTHS)
    ids, mask = pad_left(prompts, pad=0)
    made = EagleFSD(target, tiny_head()).generate(ids, mask, max_new_tokens=NEW_TOKENS)
    for prompt, text in zip(prompts, made.new_tokens, strict=True):
        assert len(text) == NEW_TOKENS
        with torch.no_grad():
            logits = model(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(text)[:, None])[:, 0]
        assert (logits.amax(1) - chosen).max() < 0.05 * logits.std()


# --- one masked forward ---


def test_verify_equals_plain_forwards_over_every_path() -> None:
    """Sibling paths deeper than the window, in a ragged batch: logits and features of every node."""
    target = target_of("mistral")
    prompts = prompts_of((4, 11), seed=1)
    parents = [-1, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 3]
    depths = [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 3]
    tokens = torch.tensor(prompts_of((13, 13), seed=2))
    tree = DraftTree(
        tokens=tokens,
        parents=torch.tensor([parents] * 2),
        depths=torch.tensor([depths] * 2),
        log_q=torch.empty(2, 0, VOCAB),
        owners=torch.empty(2, 0, dtype=torch.int64),
        depth=6,
    )
    session = TargetSession(target, batch=2, capacity=4)
    with torch.inference_mode():
        width = max(map(len, prompts))
        session.prefill(torch.tensor([row + [0] * (width - len(row)) for row in prompts]), [4, 11])
        logits, features = session.verify(tree)
        for row, prompt in enumerate(prompts):
            for node in range(13):
                path, at = [], node
                while at >= 0:
                    path.insert(0, int(tokens[row, at]))
                    at = parents[at]
                plain = target.model(torch.tensor([prompt + path]), output_hidden_states=True)
                torch.testing.assert_close(logits[row, node], plain.logits[0, -1], atol=1e-4, rtol=1e-4)
                torch.testing.assert_close(
                    features[row, node], plain.hidden_states[-1][0, -1], atol=1e-4, rtol=1e-4
                )


def test_a_prompt_longer_than_the_prefill_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = prompts_of((23, 5, 16))
    right = torch.tensor([row + [0] * (23 - len(row)) for row in prompts])
    for family in ("llama", "gemma3", "mistral", "gpt2"):
        features = {}
        for chunk in (512, 7, 1):
            monkeypatch.setattr("eagle_fsd.runtime.kv_cache.WIDEST", chunk)
            session = TargetSession(target_of(family), batch=3, capacity=2)
            with torch.inference_mode():
                features[chunk] = session.prefill(right, [23, 5, 16])
            assert session.cache.row_lengths == [23, 5, 16]
        for row, length in enumerate((23, 5, 16)):
            for chunk in (7, 1):
                torch.testing.assert_close(
                    features[chunk][row, :length], features[512][row, :length], atol=1e-4, rtol=1e-4
                )


# --- the two ends ---


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "granite", "cohere", "gptj"])
def test_logits_of_features_are_the_models_logits(family: str) -> None:
    """Soft-caps, scales and biases of the last layer included: lm_head alone is not enough."""
    target = target_of(family, "eager")
    ids = torch.tensor(prompts_of((9,)))
    with torch.no_grad():
        features = target.decoder(input_ids=ids).last_hidden_state
        wanted = target.model(input_ids=ids).logits
        torch.testing.assert_close(target.logits(features), wanted.float(), atol=1e-5, rtol=1e-5)
        if family in ("gemma2", "gemma3", "granite", "cohere"):
            assert not torch.allclose(target.lm_head(features), wanted, atol=0.1)


@pytest.mark.parametrize("family", ["gemma2", "granite", "cohere"])
def test_the_drafts_law_goes_through_the_same_logits(family: str) -> None:
    target = target_of(family, "eager")
    engine = EagleFSD(target, tiny_head())
    drafter = engine.drafter.make(1, 64, TreeConfig(16, 5, 8))
    with torch.inference_mode():
        features = torch.randn(1, 3, HIDDEN, generator=torch.Generator().manual_seed(0))
        feed(drafter, features, torch.tensor([[5, 6, 7]]), [3])
        tree = drafter.draft(torch.tensor([7]), TreeConfig(16, 3, 8))
        wanted = target.logits(drafter.root_states).log_softmax(-1)
    row = tree.owners[0].tolist().index(0)
    torch.testing.assert_close(tree.log_q[0, row], wanted[0])


def test_embeddings_are_unscaled() -> None:
    """Gemma scales embeddings on their way in; EAGLE's heads read the rows as they are stored."""
    target = target_of("gemma3")
    tokens = torch.tensor([[3, 5]])
    assert torch.equal(target.embed(tokens), target.model.get_input_embeddings().weight[tokens])
    assert not torch.equal(target.embed(tokens), target.model.get_input_embeddings()(tokens))


def test_end_tokens_are_those_of_generate() -> None:
    model = tiny_model("llama", eos_token_id=5)
    target = TargetModel(model)
    model.generation_config = transformers.GenerationConfig(eos_token_id=[7, 9])
    assert target.eos_token_ids == (7, 9)
    model.generation_config.eos_token_id = None
    assert target.eos_token_ids == (5,)
    model.config.eos_token_id = None
    assert target.eos_token_ids == ()


# --- windows and positions that only look supported ---


def test_a_window_that_the_model_class_ignores_is_ignored() -> None:
    """Llama has no windows, whatever its config says: found on one verified tree, not by the attribute."""
    model = tiny_model("llama", sliding_window=WINDOW)
    target = TargetModel(model)
    prompt = prompts_of((2 * WINDOW,))
    wanted = greedy_alone(tiny_model("llama"), prompt, NEW_TOKENS)
    out = KnowingEngine(target, wanted).generate(prompt, max_new_tokens=NEW_TOKENS, tree=TREE)
    assert out.new_tokens == wanted
    assert out.stats[0].tau > 2
    assert model.config.sliding_window == WINDOW, "the check leaves the config as it was"


def test_texts_of_a_longrope_model_end_where_its_angles_change() -> None:
    factors = [1.0, 2.0, 3.0, 4.0]
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": factors,
        "long_factor": [4 * factor for factor in factors],
        "original_max_position_embeddings": 32,
    }
    model = tiny_model("phi3", rope_parameters=rope, original_max_position_embeddings=32)
    prompt = prompts_of((20,))
    target = TargetModel(model)
    assert target.max_positions == 32
    wanted = greedy_alone(model, prompt, 12)
    out = KnowingEngine(target, wanted).generate(prompt, max_new_tokens=100, tree=TREE)
    assert out.new_tokens == wanted
    assert out.stats[0].finish_reason == "length"
    with pytest.raises(ValueError, match="row 0 of the batch has 32 tokens"):
        EagleFSD(target, tiny_head()).generate(prompts_of((32,)))


def test_positions_of_a_model_without_a_limit() -> None:
    assert longest_text(transformers.BloomConfig()) > 10**9
    assert longest_text(transformers.GPT2Config(n_positions=77)) == 77
    assert longest_text(transformers.Llama4TextConfig()) == 8192 - 1024  # then queries are scaled by slots
    assert longest_text(transformers.Llama4TextConfig(attn_temperature_tuning=False)) > 10**5


@pytest.mark.parametrize("family", ["gpt2", "gptj", "llama"])
def test_a_text_may_fill_every_position(family: str) -> None:
    """Nodes beyond the last position are verified for nothing, but not out of an embedding's range."""
    sizes = {"max_position_embeddings": 24} if family == "llama" else {"n_positions": 24}
    model = tiny_model(family, "eager", **sizes)
    prompts = prompts_of((15, 20))
    target = TargetModel(model)
    wanted = [greedy_alone(model, [prompt], 24 - len(prompt))[0] for prompt in prompts]
    ids, mask = pad_left(prompts, pad=0)
    for engine in (KnowingEngine(target, wanted, reach=None), EagleFSD(target, tiny_head())):
        out = engine.generate(ids, mask, max_new_tokens=100, tree=TREE)
        assert out.new_tokens == wanted
        assert [stats.finish_reason for stats in out.stats] == ["length", "length"]


# --- refusals ---


SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def small_t5() -> transformers.PreTrainedModel:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    )


def small_rwkv() -> transformers.PreTrainedModel:
    return transformers.RwkvForCausalLM(
        transformers.RwkvConfig(
            vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32
        )
    )


def small_bert() -> transformers.PreTrainedModel:
    return transformers.BertLMHeadModel(transformers.BertConfig(**{**SMALL, "pad_token_id": 0}))


def small_bloom() -> transformers.PreTrainedModel:
    return transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=1, n_head=4)
    )


def small_mpt() -> transformers.PreTrainedModel:
    model = transformers.MptForCausalLM(
        transformers.MptConfig(vocab_size=VOCAB, d_model=32, n_layers=2, n_heads=4, expansion_ratio=2)
    )
    return model


def windowless_gemma3() -> transformers.PreTrainedModel:
    """A layer that its config calls a sliding one, with no window to slide."""
    return tiny_model("gemma3", sliding_window=None)


def small_gpt_neo() -> transformers.PreTrainedModel:
    config = transformers.GPTNeoConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_layers=2,
        attention_types=[[["global", "local"], 1]],
        num_heads=4,
        window_size=WINDOW,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.GPTNeoForCausalLM(config)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (small_t5, "'t5' model: encoder-decoders are not supported"),
        (small_rwkv, "'rwkv' model whose recurrent layers keep their states where"),
        (small_bert, "'bert' model whose tree verification differs .* attend to those that follow"),
        (small_bloom, "'bloom' model, which cannot verify draft trees here: it has ALiBi"),
        (small_mpt, "'mpt' model whose tree verification differs .* it has ALiBi"),
        (small_gpt_neo, "'gpt_neo' model with layers of kind .*local"),
        (windowless_gemma3, "'gemma3_text' model, which cannot verify draft trees"),
        (lambda: tiny_model("llama", "flex_attention"), "attn_implementation is 'flex_attention'"),
    ],
    ids=lambda value: getattr(value, "__name__", "").removeprefix("small_"),
)
def test_other_models_are_refused_in_one_line(
    make: Callable[[], transformers.PreTrainedModel], reason: str
) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make().eval()
    with pytest.raises(ValueError, match=reason) as caught:
        TargetModel(model)
    assert "\n" not in str(caught.value)


def test_families_are_admitted_by_their_config_alone() -> None:
    for config in (
        transformers.LlamaConfig(),
        transformers.Gemma3TextConfig(),
        transformers.Qwen3NextConfig(num_hidden_layers=4),
        transformers.MambaConfig(),
        transformers.JambaConfig(),
    ):
        check_supported(config)


def test_flash_attention_is_refused() -> None:
    model = tiny_model("llama")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="tree masks need 'sdpa' or 'eager'"):
        TargetModel(model)


def test_a_bare_decoder_is_refused() -> None:
    with pytest.raises(ValueError, match="without an lm_head"):
        TargetModel(tiny_model("llama").model)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("lost", ["attention_mask", "position_ids"])
def test_a_model_that_ignores_masks_or_positions_is_refused(
    lost: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that takes the mask but sees every earlier slot, or counts slots as positions."""
    model = tiny_model("llama", attention)
    forward = model.model.forward

    def ignoring(*args: Any, **kwargs: Any) -> Any:
        cached = kwargs.get(cache_argument(type(model.model)))
        if cached is not None and lost == "position_ids":
            kwargs["position_ids"] = cached.slots
        elif cached is not None:
            seen = torch.arange(cached.view) <= cached.slots[:, :, None]
            kwargs["attention_mask"] = additive(seen, torch.float32)
        return forward(*args, **kwargs)

    monkeypatch.setattr(model.model, "forward", ignoring)
    with pytest.raises(ValueError, match="tree verification differs"):
        TargetModel(model)


# A number that all logits have in common, and what tokens without meaning have: neither changes a text.
HARMLESS = [(0, -100.0), (90, -1e4), (90, -1e9), (90, torch.finfo(torch.float32).min), (90, -math.inf)]


def with_bias(model: Any, first: int, value: float) -> Any:
    """Add a number to the logits of the tokens from `first` on."""
    head = model.lm_head
    model.lm_head = torch.nn.Linear(*head.weight.shape[::-1]).requires_grad_(False)
    model.lm_head.weight = head.weight
    model.lm_head.bias.zero_()[first:] = value
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("first", "value"), HARMLESS)
def test_large_numbers_in_the_logits_hide_no_mistake(
    first: int, value: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model is admitted with them; one that scales its logits, or whose nodes see siblings, is not."""
    model = with_bias(tiny_model("llama"), first, value).to(dtype)
    TargetModel(model)
    with monkeypatch.context() as patch:
        forward = model.forward

        def scaled(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            output.logits[..., :60] *= 0.5
            return output

        patch.setattr(model, "forward", scaled)
        with pytest.raises(ValueError, match="masks or logits follow rules"):
            TargetModel(model)
    forward = model.model.forward

    def leaking(*args: Any, **kwargs: Any) -> Any:
        cached = kwargs.get(cache_argument(type(model.model)))
        if cached is not None:
            seen = torch.arange(cached.view) <= cached.slots[:, :, None]
            kwargs["attention_mask"] = additive(seen, dtype)
        return forward(*args, **kwargs)

    monkeypatch.setattr(model.model, "forward", leaking)
    with pytest.raises(ValueError, match="tree verification differs"):
        TargetModel(model)


@pytest.mark.parametrize(("likely", "vocabulary"), [(6, 96), (200, 32_000), (1, 64)])
def test_rounding_is_small_beside_few_likely_tokens(likely: int, vocabulary: int) -> None:
    """Most of a vocabulary may be ruled out: what is left decides, and a token that only one side has."""
    draw = generator(likely)
    wanted = torch.full((3, vocabulary), -1e4)
    wanted[:, :likely] = torch.randn(3, likely, generator=draw) * 3 + 20
    found = wanted.clone()
    found[:, :likely] += 0.05 * torch.randn(3, likely, generator=draw)
    assert difference_of_logits(wanted, wanted) == 0
    if likely > 1:
        assert difference_of_logits(found.bfloat16(), wanted.bfloat16()) < 0.06
    found[:, -1] = 19.0
    assert difference_of_logits(found, wanted) > 0.5
    found[0, 0] = math.nan
    assert math.isnan(difference_of_logits(found, wanted))


def test_a_model_with_logits_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("granite")
    monkeypatch.setattr(target_module.TargetModel, "logits", lambda self, features: self.lm_head(features))
    with pytest.raises(ValueError, match="masks or logits follow rules"):
        TargetModel(model)


@pytest.mark.parametrize(("family", "kind"), [("mistral", SLIDING), ("gemma3", SLIDING), ("llama4", CHUNKED)])
def test_windows_that_work_otherwise_are_refused(
    family: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off by one, here: the check is made with a window, or a chunk, that its short text outgrows."""
    field, real = NARROWED[kind]
    monkeypatch.setitem(
        NARROWED,
        kind,
        (field, lambda visible, queries, slots, size: real(visible, queries, slots, size + 1)),
    )
    model = tiny_model(family)
    with pytest.raises(ValueError, match="tree verification differs"):
        TargetModel(model)
    assert getattr(model.config, field) == WINDOW


def test_a_forward_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")

    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("a long\nmessage")

    monkeypatch.setattr(model.model, "forward", broken)
    with pytest.raises(ValueError, match=r"here: its own forward of a text fails \(a long message"):
        TargetModel(model)


def test_a_full_device_is_not_taken_for_a_model_that_cannot_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    model = tiny_model()
    target = TargetModel(model)
    monkeypatch.setattr(TargetModel, "features", full)
    with pytest.raises(ValueError, match="target 'llama' has no memory left for a short text"):
        TargetModel(model)
    monkeypatch.setattr(TargetModel, "tapped_features", full)
    with pytest.raises(ValueError, match="target 'llama' has no memory left for a short text"):
        target.admit_taps((1, 2))


# --- placement ---


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A saved tiny target and a head for it."""
    root: Path = tmp_path_factory.mktemp("models")
    tiny_model("llama").save_pretrained(root / "target")
    save_head(tiny_head(), root / "head")
    return str(root / "target"), str(root / "head")


PARTS = ("embed_tokens", "rotary_emb", "layers.0", "layers.1", "norm")
ON_CPU = {f"model.{part}": "cpu" for part in PARTS} | {"lm_head": "cpu"}


def check_engine_of_folders(engine: EagleFSD) -> None:
    prompts = prompts_of(LENGTHS)
    wanted = greedy_alone(tiny_model("llama"), prompts, NEW_TOKENS)
    ids, mask = pad_left(prompts, pad=0)
    assert engine.generate(ids, mask, max_new_tokens=NEW_TOKENS).new_tokens == wanted
    known = KnowingEngine(engine.target, wanted).generate(ids, mask, max_new_tokens=NEW_TOKENS, tree=TREE)
    assert known.new_tokens == wanted


@pytest.mark.parametrize("device_map", ["auto", {"": "cpu"}, ON_CPU], ids=["auto", "one", "parts"])
def test_device_maps(folders: tuple[str, str], device_map: str | dict[str, str]) -> None:
    engine = EagleFSD.from_pretrained(*folders, dtype=torch.float32, device_map=device_map)
    assert next(engine.head.parameters()).device == engine.target.device == torch.device("cpu")
    check_engine_of_folders(engine)


def test_the_head_goes_where_the_last_layers_features_come_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a device map only a forward tells; the meta device stands in for a second accelerator."""
    model = tiny_model("llama")
    model.hf_device_map = {"": "meta"}
    forward = model.model.forward

    def forward_elsewhere(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.last_hidden_state = output.last_hidden_state.to("meta")
        return output

    monkeypatch.setattr(model.model, "forward", forward_elsewhere)
    monkeypatch.setattr("eagle_fsd.target.model.check_tree_verification", lambda target: None)
    target = TargetModel(model)
    assert target.device == torch.device("meta")
    assert target.input_device == torch.device("cpu")
    assert next(EagleFSD(target, tiny_head()).head.parameters()).device == torch.device("meta")


def test_a_layer_on_disk(folders: tuple[str, str], tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folders[0], device_map={**ON_CPU, "model.layers.0": "disk"}, offload_folder=str(tmp_path)
    )
    assert next(model.model.layers[0].parameters()).is_meta
    check_engine_of_folders(EagleFSD(TargetModel(model), tiny_head()))


@pytest.mark.parametrize("part", ["lm_head", "model.embed_tokens"])
def test_embeddings_on_disk_are_refused(folders: tuple[str, str], tmp_path: Path, part: str) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folders[0], device_map={**ON_CPU, part: "disk"}, offload_folder=str(tmp_path)
    )
    with pytest.raises(ValueError, match="offloads the embeddings or the lm_head"):
        TargetModel(model)
