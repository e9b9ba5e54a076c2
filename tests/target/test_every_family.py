"""Every causal language model of the installed transformers: it is refused in one line, or its text is right.

A new class of a later transformers is tried too: where it cannot be built, or is refused, the test fails.
Then it needs fields in support.every_family, or a reason here.
"""

from __future__ import annotations

import pytest
import transformers
from support.every_family import known_kinds, tiny_family
from support.tiny_models import KnowingEngine, greedy_alone

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


@pytest.mark.slow
@pytest.mark.parametrize("kind", [one for one in BERTS if one in known_kinds()])
def test_so_is_an_encoder_that_was_trained_as_a_decoder(kind: str) -> None:
    reason = refusal(kind, is_decoder=True)
    if RELEASE >= TRIED:
        assert bool(reason) == (kind != "bert-generation") and "attend to those" not in reason, reason


def refusal(kind: str, **own: object) -> str:
    """Return why a model of this kind is refused; "" if it is not, and its text is right."""
    try:
        model = tiny_family(kind, **own)
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
