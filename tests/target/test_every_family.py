"""Every causal language model of the installed transformers: it is refused in one line, or its text is right.

So are models that read images or sound as well, and have no class for text alone. A new class of a later
transformers is tried too: where it cannot be built, or is refused, the test fails. Then it needs fields in
tests/support, or a reason here.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import transformers
from support.every_family import known_kinds, tiny_family
from support.media_families import media_kinds, tiny_media_model
from support.tiny_models import KnowingEngine, greedy_alone
from transformers import PreTrainedModel

from eagle_fsd import EagleFSD, TreeConfig
from eagle_fsd.core.checks import one_line
from eagle_fsd.core.padding import pad_left
from eagle_fsd.target.model import TargetModel

RELEASE = tuple(map(int, transformers.__version__.split(".")[:2]))
TRIED = (5, 24)  # with what is said below; earlier ones build and refuse others
NEW_TOKENS = 24
# A text that repeats itself, one token, more than two windows, and the padding token itself.
PROMPTS = [[5, 9, 33, 7, 5, 9, 33, 7, 5], [3], list(range(1, 30)), [0, 4, 0, 8]]
LEFT_OUT = {
    "gemma4_assistant": "it drafts for Gemma 4 and reads that model's keys and values",
}
BERTS = (
    *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie"),
    *("megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer"),
    *("xlm-roberta", "xlm-roberta-xl", "xmod"),
)
ENCODERS = (*BERTS, "cpmant", "prophetnet", "xlm", "xlnet")
DECODERS = (  # of encoder-decoders
    *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus"),
    *("plbart", "trocr"),
)
SPARSE = (
    *("axk2", "deepseek_v32", "deepseek_v4", "dots3_note", "dots3_note_text", "glm_moe_dsa", "gpt_neo"),
    *("hy_v4", "qwen4_exp", "qwen4_exp_text"),
)
OWN_WAYS = (
    *("doge", "dory", "hrm_text", "inkling_text", "inkling2_text", "inkling2_loop_text", "mllama"),
    *("openai-gpt", "reformer", "zaya"),
)
# Kind -> a part of the reason. All others must run.
REFUSED = {
    **dict.fromkeys(ENCODERS, "its tokens attend to those that follow"),
    **dict.fromkeys(("bloom", "mpt"), "ALiBi"),
    **dict.fromkeys((*DECODERS, "modernbert-decoder"), "follow rules that are not supported"),
    **dict.fromkeys(SPARSE, "sparse attention cannot"),
    **dict.fromkeys(("minimax", "recurrent_gemma", "rwkv", "xlstm"), "recurrent layers keep their states"),
    **dict.fromkeys(("musicgen", "musicgen_melody"), "lm_heads"),
    "blt": "names no hidden_size",
    **dict.fromkeys(OWN_WAYS, "its forward takes other caches, masks or positions"),
}
ALWAYS = ("llama4_text", "hyperclovax", "moshi", "camembert", "bloom", "musicgen")
MEDIA_NOT_BUILT = {
    **dict.fromkeys(("fast_vlm", "perception_lm"), "needs the package timm"),
    **dict.fromkeys(
        (
            *("apertus1p5", "chameleon", "cohere_compass", "deepseek_ocr2", "evolla", "fun_asr_nano"),
            *("glm5_next", "granite4_vision", "idefics", "inkling2", "inkling2_loop", "janus"),
            *("kyutai_speech_to_text", "molmo2", "muse_glimmer", "muse_spark", "nemo_speechlm"),
            *("nemotron_h_omni", "pi0", "qwen2_5_omni", "qwen3_asr", "qwen3_omni_moe", "unlimited_ocr"),
            "vibevoice_asr",
        ),
        "no small one has been built",
    ),
    **dict.fromkeys(
        ("florence2", "t5gemma2", "udop"), "an encoder-decoder, which are refused by their config"
    ),
}
MEDIA_REFUSED = {
    "blip": "without an lm_head",
    **dict.fromkeys(
        (
            *("blip-2", "diffusion_gemma", "instructblip", "instructblipvideo", "kosmos-2"),
            "voxtral_realtime",
        ),
        "its own forward of a text fails",
    ),
    **dict.fromkeys(("hy_v4_vl", "mistral_large4"), "sparse attention cannot"),
    **dict.fromkeys(("inkling_mm_model", "kosmos-2.5"), "its forward takes other caches, masks or positions"),
    "paligemma": "its tokens attend to those that follow",
    **dict.fromkeys(("pix2struct", "pp_formulanet", "vision-encoder-decoder"), "encoder-decoders"),
}
MEDIA_ALWAYS = ("aya_vision", "mistral3", "qwen2_5_vl")


@pytest.mark.parametrize(
    "kind", [pytest.param(one, marks=() if one in ALWAYS else pytest.mark.slow) for one in known_kinds()]
)
def test_it_is_refused_in_one_line_or_writes_its_own_text(kind: str) -> None:
    """Greedy, in a ragged batch: with looked-up drafts, and on trees that hold the right tokens."""
    if kind in LEFT_OUT:
        pytest.skip(LEFT_OUT[kind])
    reason = refusal(kind)
    if RELEASE >= TRIED:
        assert (kind in REFUSED) == bool(reason) and REFUSED.get(kind, "") in reason, reason


@pytest.mark.parametrize(
    "kind",
    [pytest.param(one, marks=() if one in MEDIA_ALWAYS else pytest.mark.slow) for one in media_kinds()],
)
def test_so_is_a_model_that_reads_images_or_sound_too(kind: str) -> None:
    """Its text, that is: without an image or a sound in the prompt."""
    if kind in MEDIA_NOT_BUILT:
        pytest.skip(MEDIA_NOT_BUILT[kind])
    reason = refusal(kind, tiny_media_model)
    if RELEASE >= TRIED:
        assert (kind in MEDIA_REFUSED) == bool(reason) and MEDIA_REFUSED.get(kind, "") in reason, reason


@pytest.mark.slow
@pytest.mark.parametrize("kind", [one for one in BERTS if one in known_kinds()])
def test_so_is_an_encoder_that_was_trained_as_a_decoder(kind: str) -> None:
    reason = refusal(kind, is_decoder=True)
    if RELEASE >= TRIED:
        assert bool(reason) == (kind != "bert-generation") and "attend to those" not in reason, reason


def refusal(kind: str, build: Callable[..., PreTrainedModel] = tiny_family, **own: object) -> str:
    """Return why a model of this kind is refused; "" if it is not, and its text is right."""
    try:
        model = build(kind, **own)
    except Exception as error:
        if RELEASE >= TRIED:
            raise
        pytest.skip(f"not built with this transformers: {one_line(error)}")
    try:
        target = TargetModel(model)
    except ValueError as error:
        reason = str(error)
        assert reason.startswith(f"target is a {model.config.model_type!r} model") and "\n" not in reason
        return reason
    wanted = greedy_alone(model, PROMPTS, NEW_TOKENS)
    ids, mask = pad_left(PROMPTS, pad=0)
    output = EagleFSD(target, None, lookup=True).generate(
        ids, mask, max_new_tokens=NEW_TOKENS, tree=TreeConfig(12, 4, 3)
    )
    assert output.new_tokens == wanted
    output = KnowingEngine(target, wanted).generate(
        ids, mask, max_new_tokens=NEW_TOKENS, tree=TreeConfig(16, 5, 3)
    )
    assert output.new_tokens == wanted
    assert all(stats.tau > 2 for stats in output.stats)
    return ""
