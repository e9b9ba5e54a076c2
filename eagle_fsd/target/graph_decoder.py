"""A target's decoder and lm_head as OpenVINO graphs, traced from Hugging Face's own modelling code.

The traced decoder is a private copy whose layers call our attention over blocks. What cannot be traced so is
refused with a reason; the torch path runs it.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import transformers
from torch import Tensor, nn

from eagle_fsd.core.checks import one_line
from eagle_fsd.files.atomic import read_records, write_atomically
from eagle_fsd.files.provenance import processor
from eagle_fsd.runtime.kv_cache import KVCache
from eagle_fsd.runtime.openvino.backend import OpenVINO
from eagle_fsd.runtime.openvino.block_cache import BlockCache, PagedCache, WrittenCache
from eagle_fsd.runtime.openvino.kept.graph_store import NoRoom
from eagle_fsd.runtime.openvino.network import Layout, Network, Product
from eagle_fsd.runtime.openvino.traced_attention import TracedAttention, page_operator
from eagle_fsd.runtime.openvino.weight_formats import BFLOAT16
from eagle_fsd.target.architecture import FULL, cache_argument, decoder_of
from eagle_fsd.target.hf_attention import is_known_code, private_copy, use_attention
from eagle_fsd.target.kept.kept_model import KeptModel
from eagle_fsd.target.kept.outline import KeptGraphs
from eagle_fsd.target.taps import TappedDecoder
from eagle_fsd.version import __version__

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BLOCKWISE = "eagle_fsd_blocks"  # our traced attention's name among Hugging Face's
UNKNOWN = ("position_bias", "cache")  # arguments that ours does not support
REMEDY = "use runtime torch"
CONVERTER = f"transformers {transformers.__version__}"
CACHES = (BlockCache, PagedCache, WrittenCache)
ADMITTED = "admitted.json"  # beside a kept graph: where it passed the test of admission


class TracedCache:
    """Stands in for a cache while a decoder is traced: it takes a layer's new keys and lets it attend.

    layers: the numbers of those that have members, in order.
    """

    is_compileable = False

    def __init__(self, attention: TracedAttention, layers: Sequence[int]) -> None:
        self.attention = attention
        self.places = {layer: place for place, layer in enumerate(layers)}
        self.new: dict[int, Tensor] = {}  # keys by layer
        self.attended: set[int] = set()

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        self.new[layer_idx] = keys
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Return the attention of the layer that these keys are of."""
        layer = next((layer for layer, keys in reversed(self.new.items()) if keys is k), None)
        if layer is None:
            raise NotImplementedError("a layer attends to other keys than it stores")
        self.attended.add(layer)
        return self.attention.attend(self.places[layer], q, k, v, mask, scale, softcap, sinks)


_tracing: contextvars.ContextVar[TracedCache] = contextvars.ContextVar("tracing")


def blockwise_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Compute transformers' attention over the cache that is traced."""
    if unknown := [name for name in UNKNOWN if kwargs.get(name) is not None]:
        raise NotImplementedError(f"its attention takes {unknown[0]}")
    if attention_mask is None:
        raise NotImplementedError("its attention takes no mask")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    mixed = _tracing.get().attend(query, key, value, attention_mask, scale, softcap, s_aux)
    return mixed.transpose(1, 2).contiguous(), None


class GraphDecoder:
    """A target's decoder and lm_head as graphs.

    embeddings: the model's own layer. kinds: of masks, in order. taps: those that the decoder's graph shows,
    ascending; see target.taps.
    """

    def __init__(
        self,
        embeddings: nn.Module,
        kinds: Sequence[str],
        decoder: Network,
        lm_head: Product,
        runtime: OpenVINO,
        taps: Sequence[int] = (),
    ) -> None:
        self.embeddings, self.kinds, self.runtime = embeddings, list(kinds), runtime
        self.taps = tuple(taps)
        self.cache, self.members = decoder.layout.cache, decoder.layout.members
        self._decoder, self._lm_head = decoder, lm_head

    @property
    def paged(self) -> bool:
        """Whether forwards see all slots before their own, whatever their mask says."""
        return self.cache is PagedCache

    @property
    def weight_bytes(self) -> int:
        """The bytes of the weights of both graphs."""
        return self._decoder.weight_bytes + self._lm_head.weight_bytes

    def kept(self, window: int) -> KeptGraphs | None:
        """Return where these graphs are kept; None if they are not, were not admitted here, or show taps."""
        folders = [one.variants.folder for one in (self._decoder, self._lm_head)]
        if None in folders or self.taps or not self.was_admitted():
            return None
        names = [folder.name for folder in folders if folder is not None]
        return KeptGraphs(*names, self.kinds, self.members, self.cache.__name__, window)

    def was_admitted(self) -> bool:
        """Return whether these graphs are kept, and passed the test of admission here in another process."""
        folder = self._decoder.variants.folder
        with contextlib.suppress(OSError):
            return folder is not None and read_records(folder / ADMITTED) == here()
        return False

    def note_admission(self) -> None:
        """Note that these graphs passed the test of admission."""
        if (folder := self._decoder.variants.folder) is not None:
            with contextlib.suppress(OSError):
                write_atomically(folder / ADMITTED, json.dumps(here()) + "\n")

    def note_taps(self, tapped: GraphDecoder) -> None:
        """Note where the graph is kept that shows these taps too, which passed the tests of admission."""
        mine, its = (graphs._decoder.variants.folder for graphs in (self, tapped))
        if mine is not None and its is not None:
            with contextlib.suppress(OSError):
                note = {"decoder": its.name, **here()}
                write_atomically(mine / name_of_note(tapped.taps), json.dumps(note) + "\n")

    def with_taps(self, taps: Sequence[int]) -> GraphDecoder | None:
        """Return the graphs that show these taps as `note_taps` noted them; None if they are not kept."""
        folder = self._decoder.variants.folder
        if folder is None:
            return None
        with contextlib.suppress(OSError, KeyError, TypeError):
            note = read_records(folder / name_of_note(taps))
            if {**here(), "decoder": note["decoder"]} == note:
                network = self.runtime.read_network(note["decoder"], self._decoder.layout)
                if network is not None:
                    parts = (self.embeddings, self.kinds, network, self._lm_head, self.runtime)
                    return GraphDecoder(*parts, sorted(taps))
        return None

    def new_cache(self, batch: int, capacity: int) -> BlockCache:
        return self._decoder.new_cache(batch, capacity)

    def expect(self, rows: int, nodes: int, again: bool = True) -> None:
        """Compile ahead for trees of this many nodes, since many are about to come. again: see Variants."""
        self._decoder.variants.expect((rows, nodes), again)
        self._lm_head.variants.expect((rows * nodes,), again)

    def features(
        self, tokens: Tensor, positions: Tensor, visible: Mapping[str, Tensor], cache: KVCache
    ) -> Tensor:
        """Return post-norm hidden states [B, q, d]. visible: by kind of layer, [B, q, S] bool."""
        return self._states(tokens, positions, visible, cache)[0]

    def tapped_features(
        self,
        tokens: Tensor,
        positions: Tensor,
        visible: Mapping[str, Tensor],
        cache: KVCache,
        taps: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        """Return what `features` returns and these taps, which the graph shows, side by side."""
        last, *shown = self._states(tokens, positions, visible, cache)
        return last, torch.cat([shown[self.taps.index(tap)] for tap in taps], dim=-1)

    def _states(
        self, tokens: Tensor, positions: Tensor, visible: Mapping[str, Tensor], cache: KVCache
    ) -> tuple[Tensor, ...]:
        """Return the states after the last norm and at each tap that the graph shows, [B, q, d] each."""
        assert isinstance(cache, BlockCache)
        inputs = (self.embeddings(tokens), positions)
        output = self._decoder(inputs, [visible[kind] for kind in self.kinds], cache)
        return output.chunk(1 + len(self.taps), dim=-1)

    def logits(self, features: Tensor) -> Tensor:
        """Return the lm_head's output [..., V] float32."""
        return self._lm_head(features.float())


def trace_graphs(
    model: PreTrainedModel,
    kinds: Sequence[str],
    layers: Mapping[int, tuple[Tensor, Tensor]],
    runtime: OpenVINO,
    cache: type[BlockCache] = BlockCache,
    taps: Sequence[int] = (),
) -> GraphDecoder:
    """Return a model's graphs in the runtime's weight format.

    kinds: of its layers' masks, in order. layers: each layer's keys and values in a cache, by its number.
    cache: that they read; see caches_for. taps: those to show; see target.taps. Raises ValueError if the
    model cannot be traced, or has no such taps.
    """
    kinds, numbers = list(kinds), sorted(layers)
    members = [(tensor.shape[1], tensor.shape[3]) for number in numbers for tensor in layers[number]]
    kept = is_known_code(decoder_of(model))  # else the key of a graph does not say all of it
    decoder = private_copy(decoder_of(model))
    use_attention(decoder, BLOCKWISE, blockwise_attention_forward)
    taps = sorted(set(taps))
    tapped = TappedDecoder(decoder, decoder.config.num_hidden_layers, taps) if taps else None

    def work(inputs: Sequence[Tensor], attention: TracedAttention) -> Tensor:
        cache, masks = TracedCache(attention, numbers), attention.masks
        given = {
            "inputs_embeds": inputs[0],
            "position_ids": inputs[1],
            "attention_mask": dict(zip(kinds, masks, strict=True)) if len(masks) > 1 else masks[0],
            cache_argument(type(decoder)): cache,
            "use_cache": True,
        }
        token = _tracing.set(cache)
        try:
            output, shown = (decoder(**given), []) if tapped is None else tapped(**given)
        finally:
            _tracing.reset(token)
        if missed := set(numbers) - cache.attended:
            raise NotImplementedError(f"layer {min(missed)} has an attention of its own")
        states = output.last_hidden_state
        if shown:
            states = torch.cat((states, *shown), dim=-1)
        return states

    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    layout = layout_of(runtime, embeddings, kinds, members, cache)
    try:
        made_of = [CONVERTER, decoder.config.to_json_string(use_diff=False), kinds, *([taps] if taps else [])]
        network = runtime.network("decoder", decoder, work, layout, made_of, kept)
        product = runtime.product("lm_head", head.weight, head.bias)
    except NoRoom as error:
        raise ValueError(f"the target's graphs cannot be made: {one_line(error)}; or {REMEDY}") from error
    except Exception as error:  # the tracer's errors have no common base
        raise ValueError(
            f"target is a {model.config.model_type!r} model, which cannot be converted for OpenVINO "
            f"({one_line(error, 200)}): it must be traceable, with Hugging Face's attention; {REMEDY}"
        ) from error
    return GraphDecoder(embeddings, kinds, network, product, runtime, taps)


def read_graphs(model: KeptModel, runtime: OpenVINO) -> GraphDecoder:
    """Return the graphs that are kept of a model. Raises ValueError if they are gone or from elsewhere."""
    kept, kind = model.outline.graphs, model.config.model_type
    cache = next(one for one in CACHES if one.__name__ == kept.cache)
    layout = layout_of(runtime, model.embeddings, kept.kinds, kept.members, cache)
    network = runtime.read_network(kept.decoder, layout)
    product = runtime.read_product(kept.lm_head, *model.lm_head.weight.shape)
    if network is None or product is None:
        raise ValueError(f"the graphs of {kind!r} are not kept any more: load it whole")
    found = GraphDecoder(model.embeddings, kept.kinds, network, product, runtime)
    if not found.was_admitted():
        raise ValueError(
            f"the graphs of {kind!r} were not tested on this machine: they must be; load it whole"
        )
    return found


@torch.inference_mode()
def layout_of(
    runtime: OpenVINO,
    embeddings: nn.Module,
    kinds: Sequence[str],
    members: Sequence[Sequence[int]],
    cache: type[BlockCache],
) -> Layout:
    """Return the layout of a decoder that takes embeddings and positions."""
    positions = torch.arange(3, device="cpu")[None]
    examples = embeddings(torch.zeros_like(positions)), positions
    return runtime.layout(examples, len(kinds), [(heads, width) for heads, width in members], cache)


def caches_for(kinds: Sequence[str], runtime: OpenVINO, pages: bool) -> list[type[BlockCache]]:
    """Return the caches that a target's graphs may read, the best one first. pages: see TargetModel.

    Pages are for full attention alone, and not for bfloat16.
    """
    if runtime.operators is not None:
        return [WrittenCache, BlockCache]
    paged = (
        pages and list(kinds) == [FULL] and runtime.weight_format != BFLOAT16 and page_operator() is not None
    )
    return [PagedCache, BlockCache] if paged else [BlockCache]


def name_of_note(taps: Sequence[int]) -> str:
    """Return the name of the file beside a kept graph that tells of the one with these taps."""
    return f"taps-{'-'.join(map(str, sorted(taps)))}.json"


def here() -> dict[str, str]:
    """Return what a test of admission depends on, beside the graph's folder, whose name tells the rest."""
    return {"eagle_fsd": __version__, "processor": processor()}
