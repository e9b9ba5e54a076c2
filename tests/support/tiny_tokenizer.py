"""A real tokenizer for the tiny models: one token a character, a begin token, and a chat template."""

from __future__ import annotations

from collections.abc import Sequence

import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from tokenizers.pre_tokenizers import ByteLevel

from support.tiny_models import VOCAB

PAD, BEGIN, END = "<pad>", "<s>", "<end>"  # ids 0, 1, 2
CHARACTERS = "\n" + "".join(map(chr, range(32, 124)))
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def tiny_tokenizer(special: int | None = None, word: str = "<stop>") -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer of VOCAB tokens; the id `special` is the special token `word` and no character.

    Every text begins with <s>, as in Llama's tokenizers.
    """
    tokens = [PAD, BEGIN, END, *CHARACTERS]
    assert len(tokens) == VOCAB
    if special is not None:
        tokens[special] = word
    inner = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=PAD))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    inner.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, 1)])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=PAD, bos_token=BEGIN, eos_token=END, chat_template=TEMPLATE
    )
    if special is not None:
        tokenizer.add_tokens([word], special_tokens=True)
    assert len(tokenizer) == VOCAB
    return tokenizer


JOINED = [("{", '"'), ('"', ":"), ("t", "r"), ("u", "e")]  # tokens of two characters
TOOL_TEMPLATE = (
    "{% if tools %}system: {% for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}{% endif %}"
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}\n<tool_call>\n{{ call['function'] | tojson }}\n"
    "</tool_call>{% endfor %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def byte_tokenizer(template: str = TEMPLATE) -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer of VOCAB tokens as real models have them, on bytes, with all that JSON needs."""
    left_out = set("~`^|@#$")
    characters = [one for one in "\n" + "".join(map(chr, range(32, 127))) if one not in left_out]
    split = ByteLevel(add_prefix_space=False, use_regex=False)
    letters = [split.pre_tokenize_str(one)[0][0] for one in characters]
    tokens = [PAD, BEGIN, END, *letters, *map("".join, JOINED)]
    assert len(tokens) == VOCAB
    inner = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, JOINED))
    inner.pre_tokenizer, inner.decoder = split, decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=PAD, bos_token=BEGIN, eos_token=END, chat_template=template
    )


def decoding_tokenizer(
    tokens: Sequence[str], decoder: decoders.Decoder
) -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer of END and these tokens, which only decodes."""
    inner = Tokenizer(models.WordLevel({token: i for i, token in enumerate([END, *tokens])}, unk_token=END))
    inner.decoder = decoder
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END)
