"""EleutherAI's lm-evaluation-harness with the model eagle_fsd beside its own: any of its generative tasks.

    python eval/harness.py --model eagle_fsd --model_args threshold=0.3 --tasks gsm8k --limit 10
    python eval/harness.py --model eagle_fsd --model_args threshold=0.3,divergence=js,total_tokens=16 \\
        --gen_kwargs do_sample=true,temperature=0.6,top_p=0.9,top_k=50 --apply_chat_template \\
        --tasks ifeval --batch_size 4 --output_path runs/harness --log_samples

The flags are lm-eval's own. --model_args: base_model, ea_model, dtype, device ... of the models; threshold,
divergence, mode, child ... of the rule, or rule=cactus:0.1; total_tokens (or auto), depth, top_k of the tree;
batch_size, max_gen_toks, seed. With --use_cache take another file for every setting: lm-eval's cache does not
know them.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from eagle_fsd.cli.mistakes import report_mistake
from eagle_fsd.core.process.signals import report_interrupt


def main(argv: Sequence[str] | None = None) -> None:
    if argv is not None:
        sys.argv[1:] = argv  # lm-eval reads the process's own arguments
    if not {"-h", "--help"}.isdisjoint(sys.argv):
        sys.stdout.write(f"{__doc__}\n")  # lm-eval's own help follows
        if find_spec("lm_eval") is None:
            sys.stdout.write(
                "lm-eval is not installed and shows no flags: pip install 'eagle-fsd[harness]'\n"
            )
            return
    try:
        import eagle_fsd.integrations.lm_eval.model  # noqa: F401  # registers the model
        from eagle_fsd.hub.loading.progress import hide_notes_of_libraries

        hide_notes_of_libraries()
        logging.basicConfig(format="%(message)s")
        logging.getLogger("eagle_fsd").setLevel(logging.INFO)
        from lm_eval.__main__ import cli_evaluate

        cli_evaluate()
    except (ValueError, OSError, FloatingPointError, NotImplementedError, ImportError) as error:
        sys.exit(report_mistake(Path(sys.argv[0]).name, error))
    except KeyboardInterrupt:
        sys.exit(report_interrupt())
