"""A page that needs nothing else: one style in light and dark, for a narrow window and a wide one.

A page has no script and loads nothing, and its own policy forbids both, so that it can be kept with
a failed job and opened anywhere. What is wider than the window scrolls in a box of its own, by the
keyboard too, and keeps its size of text.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from itertools import islice

from ftckpt.commands.cli.render import block

from .palette import DARK, FAINT, GROUND, INK, LINE

ROWS = 1000  # of a table; a page of more is slow to open, and the numbers lie beside it

# Colours come in pairs: a ground, and what is written on it or stands for it in a line.
COLOURS = f"""
:root {{ color-scheme: light dark; --ground: {GROUND}; --ink: {INK}; --faint: {FAINT};
  --line: {LINE}; --none: #f1f1f1; --good: #bfe5d5; --on-good: #0b5c43; --bad: #f3b8a0;
  --on-bad: #7a2600; --warn: #f5dfae; --on-warn: #6b4e00; --focus: #0072B2; }}
@media (prefers-color-scheme: dark) {{ :root {{ --ground: {DARK[GROUND]}; --ink: {DARK[INK]};
  --faint: {DARK[FAINT]}; --line: {DARK[LINE]}; --none: #262626; --good: #155a44;
  --on-good: #c9f2e3; --bad: #8a3a17; --on-bad: #ffd9c9; --warn: #6b5210; --on-warn: #ffe9b0;
  --focus: #56B4E9; }} }}
"""
STYLE = f"""{COLOURS}
body {{ font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground);
  margin: 2rem auto; max-width: 80rem; padding: 0 1rem; overflow-wrap: anywhere; }}
h1 {{ font-size: 1.4rem; line-height: 1.25; margin: 0 0 .6rem; }}
h2, summary {{ font-size: 1.05rem; font-weight: 600; margin: 1.6rem 0 .3rem; }}
summary {{ cursor: pointer; margin: .5rem 0; }} p {{ margin: .5rem 0; }}
.faint {{ color: var(--faint); font-size: 14px; }}
.good {{ background: var(--good); color: var(--on-good); }}
.bad {{ background: var(--bad); color: var(--on-bad); }}
.warn {{ background: var(--warn); color: var(--on-warn); }}
.none {{ background: var(--none); }}
dl {{ display: grid; grid-template-columns: minmax(5rem, max-content) 1fr; gap: .2rem 1rem;
  margin: .8rem 0; }}
dt {{ color: var(--faint); }} dd {{ margin: 0; }}
.scroll {{ overflow-x: auto; margin: .2rem 0 1rem; padding-bottom: 3px; }}
:focus-visible {{ outline: 3px solid var(--focus); outline-offset: 1px; }}
figure {{ margin: 0; }} figure svg {{ display: block; width: 100%; height: auto; }}
table {{ border-collapse: collapse; font-size: 14px; overflow-wrap: normal; }}
caption {{ text-align: left; color: var(--faint); padding: .2rem 0; }}
th {{ font-weight: 600; white-space: nowrap; }}
.list td, .list th {{ text-align: left; padding: .1rem .7rem .1rem 0; vertical-align: top;
  border-bottom: 1px solid var(--line); }}
.list .number {{ text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }}
"""
POLICY = (
    "<meta http-equiv=Content-Security-Policy"
    " content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">"
)


def page(title: str, *body: str, style: str = "") -> str:
    """Return a whole page.

    Args:
        title: of the window, as plain text.
        body: pieces of HTML; `safe` makes one of text.
        style: rules that only this page needs.
    """
    return "\n".join(
        (
            f"<!doctype html><html lang=en><meta charset=utf-8>{POLICY}"
            "<meta name=viewport content='width=device-width, initial-scale=1'>"
            f"<title>{safe(title)}</title><style>{STYLE}{style}</style>",
            "<main>",
            *body,
            "</main></html>\n",
        )
    )


def safe(text: str) -> str:
    """Return text as HTML, for an element or a quoted attribute; no control character in it."""
    return html.escape(block(text), quote=True)


def scrolled(inner: str, label: str) -> str:
    """Put HTML that may be wider than the window into a box that scrolls, by arrow keys too.

    Args:
        inner: HTML.
        label: what the box holds, read out by a screen reader.
    """
    return f'<div class=scroll role=region tabindex=0 aria-label="{safe(label)}">{inner}</div>'


def table(columns: Mapping[str, Sequence[object]], caption: str, *, rows: int = ROWS) -> str:
    """Return a table in its box: numbers to the right, the rest to the left.

    Args:
        columns: of equal length, by heading.
        caption: what it shows; it also says how many rows are left out.
        rows: more are left out.
    """
    total = max(map(len, columns.values()), default=0)
    if total > rows:
        caption += f" (the first {rows:,} of {total:,} rows)"
    head = "".join(f"<th scope=col>{safe(name)}" for name in columns)
    lines = (
        "<tr>" + "".join(map(_cell, row))
        for row in islice(zip(*columns.values(), strict=True), rows)
    )
    inner = f"<table class=list><caption>{safe(caption)}</caption><thead><tr>{head}</thead>\n"
    return scrolled(inner + "<tbody>" + "\n".join(lines) + "</table>", caption)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"<td class=number>{value:.6g}"
    if isinstance(value, int):
        return f"<td class=number>{value}"
    return "<td>" if value is None else f"<td>{safe(str(value))}"
