"""Verify every tree twice, with OpenVINO and with ONNX Runtime, inside one and the same decoding loop.

A trial behind a table of eval/RUNTIMES.md. It needs onnx and onnxruntime beside this package:

    python eval/results/runtimes/packed_inside_the_loop.py packed 2 24 256 4096

Arguments: the weight format (packed or int8), prompts of each set, new tokens, and lengths of the context.
The second graph is built by hand, with ONNX Runtime's own operators for Llama. It reads the keys and values
that OpenVINO has computed, so both verify the same trees of the same texts; which is first takes turns.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from eagle_fsd import EagleFSD, TreeConfig
from eagle_fsd.core.tree import DraftTree, ancestors
from eagle_fsd.evaluation.measure.speed import stretched
from eagle_fsd.hub.resolve import shipped_gguf
from eagle_fsd.runtime.openvino.gguf_blocks import GGUFBlocks
from eagle_fsd.runtime.openvino.weight_formats import round_to_int8
from eagle_fsd.target.session import TargetSession

MICROSOFT, WIDTH, ROOM = "com.microsoft", 64, 4608  # the size of a head, and slots of the cache
TREES = {"1": TreeConfig(1)} | {name: TreeConfig.parse(name) for name in ("4/4/2", "8/6/2", "16/5/8")}


class Graph:
    """A Llama decoder and its lm_head as an ONNX graph. encode: returns a weight's blocks."""

    def __init__(self, model: Any, encode: Callable[[np.ndarray], Any]) -> None:
        self.encode, self.nodes, self.values = encode, [], []
        config, decoder = model.config, model.model
        heads, groups, eps = config.num_attention_heads, config.num_key_value_heads, config.rms_norm_eps
        angles = np.arange(8192)[:, None] / config.rope_parameters["rope_theta"] ** (
            np.arange(0, WIDTH, 2) / WIDTH
        )
        self.constant("cos", np.cos(angles).astype(np.float32))
        self.constant("sin", np.sin(angles).astype(np.float32))
        norms = [layer.input_layernorm for layer in decoder.layers] + [decoder.norm]
        first = ["x", self.weight("norm", norms[0])]
        self.add("SimplifiedLayerNormalization", first, ["n0"], "", epsilon=eps)
        normed, residual = "n0", "x"
        sizes = self.constant("sizes", np.array([heads * WIDTH, groups * WIDTH, groups * WIDTH]))
        for i, (layer, norm) in enumerate(zip(decoder.layers, norms[1:], strict=True)):
            attention, mlp = layer.self_attn, layer.mlp
            self.product(f"qkv{i}", normed, attention.q_proj, attention.k_proj, attention.v_proj)
            self.add("Split", [f"qkv{i}", sizes], [f"q{i}", f"k{i}", f"v{i}"], "", axis=-1)
            for one, count in (("q", heads), ("k", groups)):
                rotated = [f"{one}{i}", "positions", "cos", "sin"]
                self.add("RotaryEmbedding", rotated, [f"{one}r{i}"], num_heads=count)
            seen = [f"qr{i}", f"kr{i}", f"v{i}", f"pk{i}", f"pv{i}", "before", "total", "", "", "", "bias"]
            made = [f"a{i}", f"nk{i}", f"nv{i}"]
            self.add("GroupQueryAttention", seen, made, num_heads=heads, kv_num_heads=groups)
            self.product(f"o{i}", f"a{i}", attention.o_proj)
            normed, residual = self.norm(f"p{i}", residual, f"o{i}", layer.post_attention_layernorm, eps)
            self.product(f"gu{i}", normed, mlp.gate_proj, mlp.up_proj)
            self.add("Split", [f"gu{i}"], [f"g{i}", f"u{i}"], "", axis=-1, num_outputs=2)
            self.add("QuickGelu", [f"g{i}"], [f"s{i}"], alpha=1.0)
            self.add("Mul", [f"s{i}", f"u{i}"], [f"h{i}"], "")
            self.product(f"d{i}", f"h{i}", mlp.down_proj)
            normed, residual = self.norm(f"n{i + 1}", residual, f"d{i}", norm, eps)
        self.product("logits", normed, model.lm_head)
        self.layers, self.cache = len(decoder.layers), [1, groups, ROOM, WIDTH]
        self.vocabulary, self.size = config.vocab_size, heads * WIDTH

    def constant(self, name: str, array: np.ndarray) -> str:
        self.values.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def weight(self, name: str, norm: Any) -> str:
        return self.constant(f"{name}.w", norm.weight.detach().float().numpy())

    def add(self, kind: str, seen: list[str], made: list[str], domain: str = MICROSOFT, **more: Any) -> None:
        self.nodes.append(helper.make_node(kind, seen, made, domain=domain, **more))

    def norm(self, name: str, residual: str, more: str, norm: Any, eps: float) -> tuple[str, str]:
        """Add two states and norm the sum; return the names of the normed sum and of the sum."""
        made = [name, "", "", f"{name}.sum"]
        seen = [residual, more, self.weight(name, norm)]
        self.add("SkipSimplifiedLayerNormalization", seen, made, epsilon=eps)
        return name, f"{name}.sum"

    def product(self, name: str, x: str, *linears: Any) -> None:
        """Multiply with the weights of these layers; offsets of blocks make a second, small product."""
        weight = torch.cat([one.weight.detach().float() for one in linears]).numpy()
        blocks = self.encode(weight)
        rows, groups, size = blocks.integers.shape
        packed = (blocks.integers.astype(np.int16) + (8 if blocks.bits == 4 else 128)).astype(np.uint8)
        if blocks.bits == 4:
            packed = packed[:, :, 0::2] | packed[:, :, 1::2] << 4
        shape = {"K": groups * size, "N": rows, "bits": blocks.bits, "block_size": size, "accuracy_level": 4}
        scales = self.constant(f"{name}.scales", blocks.scales.astype(np.float32).reshape(-1))
        main = name if blocks.offsets is None else f"{name}.main"
        self.add("MatMulNBits", [x, self.constant(f"{name}.blocks", packed), scales], [main], **shape)
        if blocks.offsets is None:
            return
        parts = self.constant(f"{name}.shape", np.array([0, 0, groups, size]))
        self.add("Reshape", [x, parts], [f"{name}.parts"], "")
        axis = self.constant(f"{name}.axis", np.array([-1]))
        self.add("ReduceSum", [f"{name}.parts", axis], [f"{name}.sums"], "", keepdims=0)
        offsets = self.constant(f"{name}.offsets", blocks.offsets.astype(np.float32).T)
        self.add("MatMul", [f"{name}.sums", offsets], [f"{name}.more"], "")
        self.add("Add", [main, f"{name}.more"], [name], "")

    def session(self, path: Path) -> onnxruntime.InferenceSession:
        """Write the graph and return a session of it, whose threads do not spin."""
        info, reals, whole = helper.make_tensor_value_info, TensorProto.FLOAT, TensorProto.INT32
        seen = [info("x", reals, [1, "n", self.size]), info("positions", TensorProto.INT64, [1, "n"])]
        seen += [info("bias", reals, [1, 1, "n", "t"]), info("before", whole, [1]), info("total", whole, [])]
        made = [info("logits", reals, [1, "n", self.vocabulary])]
        names = [f"{one}{i}" for i in range(self.layers) for one in "kv"]
        seen += [info(f"p{name}", reals, self.cache) for name in names]
        made += [info(f"n{name}", reals, self.cache) for name in names]
        graph = helper.make_graph(self.nodes, "decoder", seen, made, self.values)
        releases = [helper.make_opsetid("", 18), helper.make_opsetid(MICROSOFT, 1)]
        onnx.save(helper.make_model(graph, opset_imports=releases, ir_version=10), path)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


class Twice:
    """Takes the place of TargetSession.verify. rows: what is known of each pair of forwards."""

    def __init__(self, engine: EagleFSD, graph: Graph, path: Path) -> None:
        self.embed, self.runs = engine.target.model.get_input_embeddings(), graph.session(path)
        names = [f"{one}{i}" for i in range(graph.layers) for one in "kv"]
        empty = np.zeros(graph.cache, np.float32)
        self.cache = {name: onnxruntime.OrtValue.ortvalue_from_numpy(empty.copy()) for name in names}
        numbers = ctypes.c_float * empty.size
        self.memory = {
            name: np.frombuffer(numbers.from_address(value.data_ptr()), np.float32).reshape(graph.cache[1:])
            for name, value in self.cache.items()
        }
        self.usual, self.label, self.copied, self.rows = TargetSession.verify, None, 0, []

    def __call__(self, session: TargetSession, tree: DraftTree) -> tuple[Tensor, Tensor]:
        length = session.cache.row_lengths[0]
        self.copy(session, length)
        calls = [lambda: self.usual(session, tree), lambda: (self.forward(tree, length), None)]
        made: dict[int, tuple[Tensor, Any]] = {}
        took = [0.0, 0.0]
        for place in (0, 1) if len(self.rows) % 2 else (1, 0):
            start = time.perf_counter()
            made[place] = calls[place]()
            took[place] = 1e3 * (time.perf_counter() - start)
        p, q = (made[place][0].float().softmax(-1) for place in (0, 1))
        same = (p.argmax(-1) == q.argmax(-1)).float().mean().item()
        self.rows.append((self.label, *took, (p - q).abs().sum(-1).mean().item() / 2, same))
        return made[0]

    def copy(self, session: TargetSession, length: int) -> None:
        """Bring the keys and values that are new in OpenVINO's pages into the other cache."""
        for target, pages in zip(self.memory.values(), session.cache.show(), strict=True):
            page = pages.shape[2]
            first, last = self.copied // page, -(-length // page)
            target[:, first * page : last * page] = pages[first:last].transpose(0, 1).flatten(1, 2).numpy()
        self.copied = length

    def forward(self, tree: DraftTree, before: int) -> Tensor:
        count, relation = tree.tokens.shape[1], ancestors(tree.parents, tree.depth)
        bias = np.zeros((1, 1, count, before + count), np.float32)
        bias[0, 0, :, before:][~relation[0].numpy()] = -1e30
        binding = self.runs.io_binding()
        binding.bind_cpu_input("x", self.embed(tree.tokens).numpy())
        binding.bind_cpu_input("positions", (before + tree.depths).numpy())
        binding.bind_cpu_input("bias", bias)
        binding.bind_cpu_input("before", np.array([before + count - 1], np.int32))
        binding.bind_cpu_input("total", np.array(before + count, np.int32))
        for name, value in self.cache.items():
            binding.bind_ortvalue_input(f"p{name}", value)
            binding.bind_ortvalue_output(f"n{name}", value)
        binding.bind_output("logits")
        self.runs.run_with_iobinding(binding)
        return torch.from_numpy(binding.get_outputs()[-1].numpy())


def main(form: str, each: int, new_tokens: int, contexts: list[int]) -> None:
    engine = EagleFSD.from_pretrained("smollm2-135m", runtime="openvino", weight_format=form, lookup=False)
    encode = GGUFBlocks(shipped_gguf()) if form == "packed" else round_to_int8
    twice = Twice(engine, Graph(engine.target.model, encode), Path(f"/tmp/{form}.onnx"))
    TargetSession.verify = lambda session, tree: twice(session, tree)
    folder = Path(os.environ["EAGLE_FSD_DATA"])
    prompts = []
    for path in sorted(folder.glob("prompts_*.jsonl")):
        for line in path.read_text().splitlines()[:each]:
            turn = [{"role": "user", "content": json.loads(line)["turns"][0]}]
            chat = engine.tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
            prompts.append(chat)
    for context in contexts:
        texts = stretched(prompts, context)[: len(prompts) if context < 1000 else 2]
        for name, tree in [*TREES.items()] * 2:
            for text in texts:
                twice.copied, twice.label = 0, (context, name)
                engine.generate([text], tree=tree, max_new_tokens=new_tokens, eos_token_id=())
        for name in TREES:
            rows = [row for row in twice.rows if row[0] == (context, name)]
            first, second = (statistics.median(row[place] for row in rows) for place in (1, 2))
            ratio = statistics.median(row[2] / row[1] for row in rows)
            tv, same = (statistics.fmean(row[place] for row in rows) for place in (3, 4))
            cells = [form, str(context), name, str(len(rows)), f"{first:.1f}", f"{second:.1f}"]
            cells += [f"{ratio:.2f}", f"{tv:.3f}", f"{same:.1%}"]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), [int(one) for one in sys.argv[4:]])
