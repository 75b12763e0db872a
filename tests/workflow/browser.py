"""A page in a real browser: headless Chromium, without a driver.

A frame of the wanted width holds the page, and a script around it looks inside and writes what it finds into
a document that Chromium then prints.
"""

import html
import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

_LOOK = """
const frame = document.getElementById("page");
frame.onload = () => {
  const inside = frame.contentDocument, width = inside.documentElement.clientWidth;
  const box = (element) => element.getBoundingClientRect();
  const name = (element) => element.textContent.trim() || element.id;
  const scrolls = (element) => element.closest(".wide") !== null;
  const wide = [...inside.querySelectorAll("body *")].filter((e) => box(e).right > width + 1 && !scrolls(e));
  const overlapping = [], outside = [];
  for (const svg of inside.querySelectorAll("svg")) {
    // In figures letters are paths, in groups called text_1, text_2, ... Rotated ones are left out.
    const texts = [...svg.querySelectorAll("text, g[id*='-text_']")].filter(
      (text) => !/rotate\\(-?[1-9]/.test(text.innerHTML) && box(text).width > 0);
    const frameBox = box(svg);
    for (const text of texts) {
      const b = box(text);
      if (b.left < frameBox.left - 1 || b.right > frameBox.right + 1 || b.top < frameBox.top - 1
          || b.bottom > frameBox.bottom + 1) outside.push(name(text));
    }
    texts.forEach((one, i) => texts.slice(i + 1).forEach((two) => {
      const a = box(one), b = box(two);
      const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (across > 1 && down > 1) overlapping.push(name(one) + " / " + name(two));
    }));
  }
  document.body.innerHTML = "<pre>" + JSON.stringify({
    width, height: inside.documentElement.scrollHeight, scroll: inside.documentElement.scrollWidth,
    wide: wide.slice(0, 5).map((e) => e.tagName + " " + name(e).slice(0, 40)),
    missing: [...inside.images].filter((i) => !i.complete || i.naturalWidth === 0).map((i) => i.src),
    svgs: inside.querySelectorAll("svg").length,
    texts: inside.querySelectorAll("svg text").length,
    fetched: frame.contentWindow.performance.getEntriesByType("resource").map((entry) => entry.name),
    overlapping, outside,
  }).replace(/&/g, "&amp;").replace(/</g, "&lt;") + "</pre>";
};
"""


# Each of `choices` sets controls of the page by id and then reads the texts that it shows.
_CHOOSE = """
const frame = document.getElementById("page");
frame.onload = () => {
  const inside = frame.contentDocument, id = (name) => inside.getElementById(name), found = [];
  for (const choice of CHOICES) {
    for (const [name, value] of Object.entries(choice)) {
      id(name).value = value;
      id(name).dispatchEvent(new Event("input"));
    }
    found.push({
      texts: Object.fromEntries([...inside.querySelectorAll("[id]")].map((e) => [e.id, e.textContent])),
      rows: [...inside.querySelectorAll("tbody tr")].map((row) => [...row.cells].map((c) => c.textContent)),
    });
  }
  document.body.innerHTML = "<pre>" + JSON.stringify({found}).replace(/&/g, "&amp;").replace(/</g, "&lt;")
    + "</pre>";
};
"""


def look_at(page: Path, width: int, folder: Path) -> dict[str, Any]:
    """What the page is like at this width in pixels; `console` has what it logged, errors included."""
    return _inside(page, width, folder, _LOOK)


def choose(page: Path, choices: Sequence[Mapping[str, object]], folder: Path) -> dict[str, Any]:
    """What the page shows after each choice, under `found`: texts by id, and its table's rows."""
    return _inside(page, 1000, folder, _CHOOSE.replace("CHOICES", json.dumps(choices)))


def _inside(page: Path, width: int, folder: Path, script: str) -> dict[str, Any]:
    around = folder / f"around-{width}.html"
    around.write_text(
        f'<body style="margin:0"><iframe id="page" style="border:0;width:{width}px;height:2000px"></iframe>'
        f"<script>{script} frame.src = {json.dumps(page.as_uri())};</script></body>"
    )
    result = subprocess.run(
        [
            str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files",
            "--disable-background-networking", "--enable-logging=stderr", "--virtual-time-budget=20000",
            f"--user-data-dir={folder / 'profile'}", "--dump-dom", around.as_uri(),
        ],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    found = re.search(r"<pre>(.*?)</pre>", result.stdout, re.DOTALL)
    assert found, result.stderr[-2000:]
    console = [line for line in result.stderr.splitlines() if ":CONSOLE" in line]
    return {**json.loads(html.unescape(found[1])), "console": console}
