"""What the scripts of train/ share: progress on stderr, and a user's mistake as one line."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable

from eagle_fsd.checkpoint import one_line


def run_command(name: str, run: Callable[[argparse.Namespace], None], args: argparse.Namespace) -> None:
    """Do a script's work; what its user can mend ends it with a line, Ctrl-C with the shell's code for it."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        run(args)
    except (ValueError, OSError) as error:
        sys.exit(f"{name}: {one_line(error, 1000)}")
    except KeyboardInterrupt:
        sys.exit(130)
