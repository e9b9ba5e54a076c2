"""The page at /: its files come from the package and from nowhere else, and its script runs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

for needed in ("fastapi", "uvicorn", "prometheus_client", "httpx"):
    pytest.importorskip(needed, reason='this needs an extra: pip install "eagle-fsd[serve]" httpx')

from starlette.testclient import TestClient
from support.serving import running, settings
from support.tiny_engine import chat_ids, text_alone, tiny_engine

from eagle_fsd import Fuzzy
from eagle_fsd.serving import app as app_module
from eagle_fsd.serving.app import create_app

FILES = {name: (app_module.PAGE / name).read_text(encoding="utf-8") for name in app_module.PAGE_FILES}


class Tags(HTMLParser):
    """All tags of a page, with their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(FILES["index.html"])

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.found.append((tag, dict(attrs)))


TAGS = Tags().found
IDS = {attributes["id"] for _, attributes in TAGS if "id" in attributes}


def test_the_page_comes_without_a_key_and_from_the_package() -> None:
    with TestClient(create_app(tiny_engine(), settings(key="secret"))) as client:
        page = client.get("/")
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
        assert "default-src 'self'" in page.headers["content-security-policy"]
        for tag, attributes in TAGS:
            place = attributes.get("src") or (attributes.get("href") if tag == "link" else None)
            if place and place != "data:,":
                assert client.get(f"/{place}").text == FILES[Path(place).name]
        for path in ("/page/../app.py", "/page/app.py", "/page/%2e%2e/app.py", "/page/"):
            assert client.get(path).status_code in (401, 404)
        assert client.get("/v1/models").status_code == 401


def test_nothing_comes_from_elsewhere() -> None:
    for text in FILES.values():
        assert not re.search(r"https?://|//\w+\.\w|@import|url\(", text)


def test_every_control_has_a_label_and_every_name_is_there() -> None:
    labels = {attributes["for"] for tag, attributes in TAGS if tag == "label"}
    controls = [attributes["id"] for tag, attributes in TAGS if tag in ("input", "textarea", "select")]
    assert set(controls) == labels
    assert set(re.findall(r'\$\("([\w-]+)"\)', FILES["script.js"])) <= IDS
    for word in ("exact", "faster"):
        assert f">{word}<" in FILES["index.html"]
    assert {"drafted", "fuzzy"} <= set(re.findall(r"^\.(\w+)", FILES["style.css"], re.MULTILINE))


STAND_IN = """
// The least of a browser that the script needs: elements that hold text and children, and fetch at a server.
const [file, server, message, threshold, compare] = process.argv.slice(1);
class Element {
  constructor() {
    Object.assign(this, { children: [], own: "", value: "", listeners: {}, attributes: {} });
  }
  append(...more) { this.children.push(...more); }
  replaceChildren() { this.children = []; }
  setAttribute(name, value) { this.attributes[name] = value; }
  addEventListener(name, listener) { this.listeners[name] = listener; }
  focus() {}
  set textContent(text) { this.own = text; this.children = []; }
  get textContent() { return this.own + this.children.map((child) => child.textContent).join(""); }
}
const known = {};
globalThis.document = {
  getElementById: (id) => (known[id] ??= new Element()),
  createElement: () => new Element(),
  addEventListener() {},
};
const fetched = globalThis.fetch;
globalThis.fetch = (path, options) => fetched(`${server}/${path}`, options);
const element = (id) => document.getElementById(id);
element("threshold").value = threshold;
element("temperature").value = "0";
element("limit").value = "20";
element("compare").checked = compare === "true";
new Function(require("fs").readFileSync(file, "utf8"))();
element("message").value = message;
element("form").listeners.submit({ preventDefault() {} });
const all = (one) => [one, ...one.children.flatMap(all)];
const timer = setInterval(() => {
  if (!element("stop").disabled) return;
  clearInterval(timer);
  const boxes = all(element("turns")).filter((one) => one.className === "turn assistant");
  console.log(JSON.stringify({
    status: element("status").textContent,
    model: element("model").textContent,
    answers: boxes.map((box) => box.children.map((child) => child.textContent)),
    origins: boxes.map((box) => box.children[1].children.map((span) => [span.className, span.own.length])),
  }));
}, 10);
"""


@pytest.mark.skipif(
    shutil.which("node") is None, reason="node is not installed, which runs the page's script"
)
def test_the_script_shows_both_answers_and_how_their_tokens_came() -> None:
    """In node, with a stand-in for the browser, against a real server."""
    with running(settings()) as (url, _):
        file = str(app_module.PAGE / "script.js")
        command = ["node", "-e", STAND_IN, file, url, "Hi", "0.1", "true"]
        made = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    page = json.loads(made.stdout)
    assert page["status"] == "" and page["model"] == "tiny, tree 8/3/3"
    (exact, fuzzy) = page["answers"]
    assert exact[:2] == ["Exact", text_alone(chat_ids(), max_new_tokens=20)]
    assert fuzzy[:2] == ["Threshold 0.1", text_alone(chat_ids(), max_new_tokens=20, rule=Fuzzy(0.1))]
    for (_, text, figures), origins in zip(page["answers"], page["origins"], strict=True):
        count = {name: sum(length for one, length in origins if one == name) for name in ("drafted", "fuzzy")}
        shown = re.fullmatch(
            r"tau (\d\.\d\d), \d+\.\d tokens/s, (\d+) tokens: (\d+) drafted, (\d+) fuzzy", figures
        )
        assert shown and int(shown[2]) == len(text) == 20
        assert [int(shown[3]), int(shown[4])] == [count["drafted"], count["fuzzy"]]
