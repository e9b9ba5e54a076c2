"""Run eagle_fsd.evaluation.serving.soak_command; `--help` says how."""

import sys

from eagle_fsd.evaluation.serving.soak_command import main

if __name__ == "__main__":
    sys.exit(main())
