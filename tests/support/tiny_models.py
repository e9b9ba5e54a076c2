"""Tiny random models of real transformers classes, and drafters that know their texts in advance.

Everything is float32 on the CPU, vocabulary 96, hidden size 32, two layers. The weights are drawn far wider
than transformers' own initialisation, so that greedy text is not one constant token, and attention is sharp
enough for a wrong mask or position to change it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from eagle_fsd.acceptance.accept import AcceptanceRule, Lossless
from eagle_fsd.core.config import SamplingConfig, TreeConfig
from eagle_fsd.core.randomness.noise import DraftNoise
from eagle_fsd.core.randomness.streams import RowRandom
from eagle_fsd.core.stats import GenerationStats
from eagle_fsd.core.tree import DraftTree
from eagle_fsd.decoding.batch import Batch
from eagle_fsd.decoding.loop import decode
from eagle_fsd.decoding.request import Request
from eagle_fsd.drafting.drafter import Drafter, Seen
from eagle_fsd.drafting.eagle_config import HeadConfig
from eagle_fsd.drafting.eagle_head import DraftHead
from eagle_fsd.engine import EagleFSD
from eagle_fsd.target.model import TargetModel
from eagle_fsd.target.session import TargetSession
from support.drafters import StandIn, StandInSpec, eagle_drafter

VOCAB, HIDDEN, WINDOW = 96, 32, 8

LLAMA_LIKE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GPT_LIKE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": HIDDEN,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}

# Family -> (model class, config class, arguments beside the common ones).
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA_LIKE),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", LLAMA_LIKE),
    "qwen2-window": (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {**LLAMA_LIKE, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", LLAMA_LIKE),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**LLAMA_LIKE, "sliding_window": WINDOW}),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**LLAMA_LIKE, **MIXED, "query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**LLAMA_LIKE, **MIXED, "query_pre_attn_scalar": 8, "final_logit_softcapping": 4.0},
    ),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", LLAMA_LIKE),
    "phi3-window": ("Phi3ForCausalLM", "Phi3Config", {**LLAMA_LIKE, "sliding_window": WINDOW}),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", LLAMA_LIKE),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT_LIKE),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", {**GPT_LIKE, "rotary_dim": 4}),
    "phi": ("PhiForCausalLM", "PhiConfig", {k: v for k, v in LLAMA_LIKE.items() if k != "head_dim"}),
    "gpt_neox": (
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {key: value for key, value in LLAMA_LIKE.items() if key not in ("num_key_value_heads", "head_dim")},
    ),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**LLAMA_LIKE, **EXPERTS, "sliding_window": WINDOW}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**LLAMA_LIKE, **EXPERTS}),
    "granite": (
        "GraniteForCausalLM",
        "GraniteConfig",
        {**LLAMA_LIKE, "logits_scaling": 7.0, "embedding_multiplier": 2.0},
    ),
    "cohere": ("CohereForCausalLM", "CohereConfig", {**LLAMA_LIKE, "logit_scale": 0.25}),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", {**LLAMA_LIKE, **MIXED, **EXPERTS}),
    "llama4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            **{**LLAMA_LIKE, "intermediate_size_mlp": 48, "num_local_experts": 4, "num_experts_per_tok": 2},
            **{"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0] * 2},
            "attention_chunk_size": WINDOW,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **{**LLAMA_LIKE, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
            **{"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8},
            **{"v_head_dim": 6, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 24},
            **{"first_k_dense_replace": 1},
        },
    ),
}


MAMBA_2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
DELTA = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
}
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
NO_HEAD_DIM = {key: value for key, value in LLAMA_LIKE.items() if key != "head_dim"}
# Families with recurrent layers, from transformers 5.22 on.
RECURRENT: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", {**LLAMA_LIKE, **LINEAR, **DELTA}),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {**LLAMA_LIKE, **LINEAR, **DELTA, **EXPERTS, "shared_expert_intermediate_size": 24},
    ),
    "olmo_hybrid": ("OlmoHybridForCausalLM", "OlmoHybridConfig", {**NO_HEAD_DIM, **LINEAR, **DELTA}),
    "lfm2": ("Lfm2ForCausalLM", "Lfm2Config", {**NO_HEAD_DIM, "layer_types": ["conv", "full_attention"]}),
    "falcon_h1": (
        "FalconH1ForCausalLM",
        "FalconH1Config",
        {**LLAMA_LIKE, **MAMBA_2, "mamba_d_ssm": 64, "lm_head_multiplier": 0.75},
    ),
    "granite_hybrid": (
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        {
            **{**NO_HEAD_DIM, **EXPERTS, **MAMBA_2, "shared_intermediate_size": 24},
            "layer_types": ["mamba", "attention"],
        },
    ),
    "nemotron_h": (
        "NemotronHForCausalLM",
        "NemotronHConfig",
        {
            **{**LLAMA_LIKE, "layers_block_type": ["mamba", "attention", "mlp", "mamba"]},
            **{
                "num_hidden_layers": 4,
                "mamba_num_heads": 4,
                "mamba_head_dim": 16,
                "ssm_state_size": 8,
                "n_groups": 1,
            },
        },
    ),
    "jamba": (
        "JambaForCausalLM",
        "JambaConfig",
        {
            **{**NO_HEAD_DIM, "num_experts": 4, "mamba_d_state": 8, "mamba_dt_rank": 4},
            **{"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
        },
    ),
    "zamba2": (
        "Zamba2ForCausalLM",
        "Zamba2Config",
        {
            **{**NO_HEAD_DIM, "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2},
            **{"hybrid_layer_ids": [1, 3], "mamba_d_state": 8, "mamba_ngroups": 1, "n_mamba_heads": 4},
            **{"mamba_headdim": 16, "num_mem_blocks": 1, "use_mamba_kernels": False},
        },
    ),
    "mamba2": (
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {
            **{"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 2, "state_size": 8},
            **{"num_heads": 4, "head_dim": 16, "n_groups": 1, "tie_word_embeddings": False},
            **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
        },
    ),
}


class Letters:
    """A tokenizer for the tests: a token is a letter."""

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join(chr(97 + token % 26) for token in tokens)


EAGER_ONLY = ("gemma2", "gptj", "gpt_oss")  # no sdpa in transformers


def attention_of(family: str) -> str:
    """Return the attention that a family is loaded with: sdpa if it can."""
    return "eager" if family in (*EAGER_ONLY, "mamba2") else "sdpa"


def tiny_model(
    family: str = "llama", attention: str = "sdpa", seed: int = 0, **overrides: object
) -> transformers.PreTrainedModel:
    """Return a model of the family with wide random weights, in eval mode, without end tokens."""
    model_class, config_class, arguments = {**FAMILIES, **RECURRENT}[family]
    config = getattr(transformers, config_class)(**{**arguments, **overrides})
    config._attn_implementation = attention
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # `randomize` shakes what vectors begin with, which may be random too
        model = getattr(transformers, model_class)(config).eval()
    randomize(model, seed)
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    return model


@torch.no_grad()
def randomize(model: torch.nn.Module, seed: int) -> None:
    """Draw every matrix so that activations keep their size, and shake the vectors (norms, biases)."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim >= 2:
            parameter.copy_(1.5 * noise / min(parameter.shape[-2:]) ** 0.5)
        elif name.endswith("bias"):
            parameter.copy_(0.1 * noise)
        else:
            parameter.add_(0.1 * noise)


def simple_model() -> PreTrainedModel:
    """Return a target whose next token depends on the last one alone, so that a head soon learns it."""
    model = tiny_model()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.zero_()
    return model


def tiny_head(seed: int = 0, hidden_size: int = HIDDEN, vocab_size: int = VOCAB, **sizes: int) -> DraftHead:
    """Return a random draft head that fits the tiny models; sizes: further fields of its config."""
    head = DraftHead(
        HeadConfig(
            hidden_size=hidden_size,
            intermediate_size=48,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            vocab_size=vocab_size,
            **sizes,
        )
    ).eval()
    randomize(head, seed)
    return head


def young_head() -> DraftHead:
    """Return a head of small weights, which soon learns: whether one as `tiny_head` makes does is chance."""
    head = tiny_head()
    for parameter in head.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(0.1)
    return head


def prompts_of(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Return random prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def greedy_alone(
    model: transformers.PreTrainedModel, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> list[list[int]]:
    """Return Hugging Face's greedy text for each prompt alone; the model's end tokens count."""
    texts = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens
        )
        texts.append(made[0, len(prompt) :].tolist())
    return texts


class KnowingDrafter(StandIn):
    """Knows each row's text in advance and drafts it among wrong tokens, on a new tree in each row and step.

    Every level of the tree has `width` nodes in random order: the path's next token, wrong siblings of it,
    and the right token below a wrong parent, which must not be taken. Beyond a random level (`reach`: between
    these two; None: the depth) the path is wrong too. With `wrong` it is never right. check: the emitted
    tokens must be the texts. first_row: the number of the first row, on which its trees depend.
    """

    def __init__(
        self,
        texts: Sequence[Sequence[int]],
        width: int = 3,
        reach: Sequence[int] | None = (1, 5),
        wrong: bool = False,
        seed: int = 0,
        first_row: int = 0,
        check: bool = True,
    ) -> None:
        self.texts = [list(text) for text in texts]
        self.emitted = [0] * len(texts)
        self.rows = len(texts)
        self.width, self.reach, self.wrong, self.check = width, reach, wrong, check
        self.randoms = [random.Random(f"{seed}/{first_row + row}") for row in range(len(texts))]

    def begin(self, seen: Seen) -> None:
        self.emitted = [0] * len(seen.counts)

    def extend(self, seen: Seen) -> None:
        self.emitted = [done + count for done, count in zip(self.emitted, seen.counts, strict=True)]

    def draft(self, roots: Tensor, config: TreeConfig, noise: DraftNoise | None = None) -> DraftTree:
        rows = [
            self._row(text, done, root, config.depth, draw)
            for text, done, root, draw in zip(
                self.texts, self.emitted, roots.tolist(), self.randoms, strict=True
            )
        ]
        tokens, parents, depths, log_q, owners = (list(part) for part in zip(*rows, strict=True))
        return DraftTree(
            tokens=torch.tensor(tokens),
            parents=torch.tensor(parents),
            depths=torch.tensor(depths),
            log_q=torch.stack(log_q),
            owners=torch.tensor(owners),
            depth=config.depth,
        )

    def select(self, rows: Sequence[int]) -> None:
        self.texts = [self.texts[row] for row in rows]
        self.emitted = [self.emitted[row] for row in rows]
        self.randoms = [self.randoms[row] for row in rows]

    def _row(self, text: list[int], done: int, root: int, depth: int, draw: random.Random) -> tuple[Any, ...]:
        if self.check and done:
            assert text[done - 1] == root, "the root is not the last emitted token"
        reach = depth if self.reach is None else draw.randint(*self.reach)
        tokens, parents, depths = [root], [-1], [0]
        path, stray, favourites = 0, None, {}
        for level in range(1, depth + 1):
            right = text[done + level - 1] if done + level <= len(text) else 0
            others = draw.sample([token for token in range(VOCAB) if token != right], self.width)
            goes_right = level <= reach and not self.wrong
            level_nodes = [(right if goes_right else others[0], path, "path"), (others[1], path, "stray")]
            if stray is not None:
                level_nodes.append((right, stray, "bait"))
            level_nodes += [(token, path, "") for token in others[2:]]
            level_nodes = level_nodes[: self.width]
            draw.shuffle(level_nodes)
            names = {}
            for token, parent, name in level_nodes:
                names[name] = len(tokens)
                tokens.append(token)
                parents.append(parent)
                depths.append(level)
            favourites[path] = tokens[names["path"]]
            if stray is not None and "bait" in names:
                favourites[stray] = right
            path, stray = names["path"], names["stray"]
        owners = (sorted(set(parents) - {-1}) + [-1] * len(tokens))[: 2 * depth]
        logits = torch.randn(len(owners), VOCAB, generator=torch.Generator().manual_seed(done))
        for row, owner in enumerate(owners):
            if owner >= 0:
                logits[row, favourites[owner]] += 8.0
        return tokens, parents, depths, logits.log_softmax(-1), owners


class KnowingEngine(EagleFSD):
    """EagleFSD whose drafter is a KnowingDrafter of these texts; use trees of depth D, top_k 3."""

    def __init__(self, target: TargetModel, texts: Sequence[Sequence[int]], **options: Any) -> None:
        spec = StandInSpec(lambda *_: KnowingDrafter(texts, **options), target.vocab_size)
        super().__init__(target, spec)


@dataclass(frozen=True)
class Decoded:
    """The result of the bare loop, by row: all new tokens, the chunk of every step, and the stats."""

    texts: list[list[int]]
    steps: list[list[list[int]]]
    stats: list[GenerationStats]


def run_loop(
    target: TargetModel,
    prompts: Sequence[Sequence[int]],
    drafter: Drafter | DraftHead,
    max_new_tokens: int | Sequence[int] = 24,
    *,
    rule: AcceptanceRule | None = None,
    tree: TreeConfig | None = None,
    sampling: SamplingConfig | None = None,
    eos: Sequence[int] = (),
    seed: int | Sequence[int] = 0,
    capacity: int = 512,
) -> Decoded:
    """Run the bare loop on a batch of prompts, with any drafter and any first capacity of the caches."""
    batch = len(prompts)
    limits = [max_new_tokens] * batch if isinstance(max_new_tokens, int) else list(max_new_tokens)
    request = Request(
        prompts=prompts,
        limits=limits,
        eos_token_ids=tuple(eos),
        rule=rule or Lossless(),
        tree=tree or TreeConfig(16, 5, 3),
        sampling=sampling or SamplingConfig(),
    )
    if isinstance(drafter, DraftHead):
        drafter = eagle_drafter(drafter, target, batch, capacity, target.device)
    session, made = TargetSession(target, batch, capacity, drafter.needs.taps), request.texts()
    steps = list(decode(Batch(session, drafter, RowRandom(seed, batch), request.tree), made))
    texts = [[token for chunks in steps for token in chunks[row]] for row in range(batch)]
    return Decoded(texts, steps, [text.stats for text in made])
