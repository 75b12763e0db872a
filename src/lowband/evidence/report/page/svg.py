"""The few SVG elements that the page's drawings are made of. Lengths are in CSS pixels at full size."""

import html
from collections.abc import Iterable

FONT_PX = 11
CHARACTER_PX = 0.62 * FONT_PX  # width of a wide letter, to estimate that of a text

Attribute = str | float


def element(name: str, content: str = "", **attributes: Attribute) -> str:
    """An SVG element. `stroke_width` becomes stroke-width, `class_` class."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_number(value)}"' for key, value in attributes.items()
    )
    return f"<{name}{written}>{content}</{name}>" if content else f"<{name}{written}/>"


def rect(x: float, y: float, width: float, height: float, **attributes: Attribute) -> str:
    return element("rect", "", x=x, y=y, width=width, height=height, **attributes)


def text(x: float, y: float, words: str, **attributes: Attribute) -> str:
    """Text whose baseline begins at (x, y), or is centred there with text_anchor="middle"."""
    return element("text", html.escape(words), x=x, y=y, **attributes)


def drawing(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    """A whole SVG that shrinks with the page; `title` is for screen readers."""
    return element(
        "svg",
        element("title", html.escape(title)) + "".join(parts),
        xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {_number(width)} {_number(height)}",
        width=width, role="img", class_="drawing", font_size=FONT_PX,
    )  # fmt: skip


def _number(value: Attribute) -> str:
    return html.escape(value, quote=True) if isinstance(value, str) else f"{value:.6g}"
