"""`python -m eagle_fsd` is the console command `eagle-fsd`."""

import sys

from eagle_fsd.cli.console import main

if __name__ == "__main__":
    sys.exit(main())
