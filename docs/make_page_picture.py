"""Take the picture of the server's page, docs/page.png, with selenium and Chromium.

    python -m eagle_fsd.serve --weight-format packed --total-tokens 8 &
    python docs/make_page_picture.py http://127.0.0.1:8000

It asks one question exactly and fuzzily, once before the picture, so that the figures are of a warm server.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.browser import browser  # noqa: E402

QUESTION, THRESHOLD, TOKENS = "Why is the sky blue?", "0.3", "90"


def ask(page: Any) -> None:
    """Ask the question and wait for both answers."""
    page.find_element("id", "message").send_keys(QUESTION, "\n")
    time.sleep(0.5)
    while not page.find_element("id", "send").is_enabled():
        time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="of a running server")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "page.png")
    arguments = parser.parse_args()
    with browser(1000, 1000) as page:
        page.get(arguments.url)
        for name, value in (("threshold", THRESHOLD), ("limit", TOKENS)):
            script = (
                "const one = document.getElementById(arguments[0]); one.value = arguments[1];"
                "one.dispatchEvent(new Event('input'))"
            )
            page.execute_script(script, name, value)
        page.find_element("id", "compare").click()
        ask(page)
        page.find_element("id", "reset").click()
        ask(page)
        page.save_screenshot(str(arguments.output))


if __name__ == "__main__":
    main()
