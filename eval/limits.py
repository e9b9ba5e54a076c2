"""What this machine allows, and how close the target's forwards and the head's drafts come to it.

    python eval/limits.py --context 256

Bandwidth and matrix rate are measured on large tensors; a forward over n nodes can be no faster than reading
all weights once, nor than multiplying with them n times.
"""

from __future__ import annotations

import argparse

from eagle_fsd import EagleFSD
from eagle_fsd.config import require_integer
from eagle_fsd.evaluation.limits import forwards, machine, packed, table
from eagle_fsd.hub import DEFAULT_TARGET
from eagle_fsd.measuring import BEAMS
from eagle_fsd.provenance import provenance


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--base-model", default=DEFAULT_TARGET, help="target: Hub id, folder or .gguf file")
    add("--ea-model", help="draft head: Hub id or folder (default: the shipped one)")
    add("--context", type=int, default=256, help="tokens in the cache; default: %(default)s")
    add("--dtype", help="default: float32 on a CPU, bfloat16 on CUDA")
    add("--device", help="default: CUDA where there is one, else the CPU")
    add("--no-pack", dest="pack", action="store_false", help="leave the linear layers as they are")
    arguments = parser.parse_args()
    try:
        require_integer("context", arguments.context, 1, "256 is usual")
        engine = EagleFSD.from_pretrained(
            arguments.base_model,
            arguments.ea_model,
            dtype=arguments.dtype,
            device=arguments.device,
            pack=arguments.pack,
        )
    except (ValueError, OSError) as error:
        parser.error(" ".join(str(error).split()))
    here = machine(engine.device, engine.dtype)
    drafted = engine.draft_vocab_size or engine.target.vocab_size
    found, costs = forwards(engine, here, arguments.context, [beam for beam in BEAMS if beam <= drafted])
    made = provenance()
    print(
        f"{made['device']}, {made['threads']} threads, {str(engine.dtype).removeprefix('torch.')}: "
        f"{here.bandwidth / 1e9:.1f} GB/s, {here.rate / 1e9:.0f} GFLOP/s; "
        f"linear layers {'packed' if packed(engine) else 'as loaded'}; milliseconds\n"
    )
    print(table(found))
    print(f"\ndrafts over {drafted} tokens: first level, each further one")
    for beam, (first, further) in costs.draft.items():
        print(f"  beam {beam}: {1000 * first:.1f}, {1000 * further:.1f}")
    print(f"accept and keep: {1000 * costs.rest:.1f}; a step without a draft: {1000 * costs.plain:.1f}")


if __name__ == "__main__":
    main()
