"""The timeline of a replay as one page that needs nothing else: steps by events, a panel a run."""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ftckpt.replay.events import EVENTS

if TYPE_CHECKING:
    from ftckpt.replay.comparing import Comparison
    from ftckpt.replay.judging import Judgement

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; margin: 2rem auto; max-width: 75rem;
       padding: 0 1rem; }
h1 { font-size: 1.4rem; margin-bottom: 0; } h2 { font-size: 1.05rem; margin: 2rem 0 .3rem; }
p { margin: .3rem 0; } .scroll { overflow-x: auto; }
table { border-collapse: separate; border-spacing: 2px; font-size: 13px; }
th { font-weight: 500; text-align: right; padding: 0 .4rem; white-space: nowrap; }
thead th { text-align: center; min-width: 1.5rem; }
td { width: 1.6rem; height: 1.3rem; text-align: center; border-radius: 3px; }
.equal { background: #bfe5d5; color: #0b5c43; } .differs { background: #f3b8a0; color: #7a2600; }
.first { outline: 3px solid #7a2600; font-weight: 700; } .none { background: #f2f2f2; }
@media (prefers-color-scheme: dark) {
  body { background: #181818; color: #ddd; } .none { background: #262626; }
  .equal { background: #155a44; color: #c9f2e3; } .differs { background: #8a3a17; color: #ffd9c9; }
  .first { outline-color: #ffb08f; } }
"""


def write_page(path: str, judgement: Judgement) -> None:
    """Write the page of a judgement to a file, replacing what is there.

    Raises:
        RefusedError, DeniedError, NoResourceError, NotFoundError: the file cannot be written.
    """
    from ftckpt.stores.atomic import write_over

    write_over(path, page(judgement).encode())


def page(judgement: Judgement) -> str:
    """Return the page: the verdict, then a grid of steps by events for each pair of runs."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width'>"
        f"<title>ftckpt replay: {_safe(judgement.verdict.value)}</title><style>{_STYLE}</style>",
        f"<h1>{_safe(judgement.verdict.value.capitalize())}</h1><p>{_safe(judgement.sentence)}</p>",
    ]
    parts += [f"<p>Note: {_safe(note)}</p>" for note in judgement.notes]
    parts += [f"<p>Problem: {_safe(problem)}</p>" for problem in judgement.problems]
    for comparison in judgement.comparisons:
        parts += _grid(comparison)
    return "\n".join(parts) + "\n</html>\n"


def _grid(comparison: Comparison) -> Iterator[str]:
    title = f"{comparison.other} against {comparison.reference}"
    said = "equal" if comparison.equal else f"differs from step {comparison.differences[0].step}"
    yield f"<h2>{_safe(title)}: {said}</h2>"
    words = {(d.step, d.event, d.rank): d.words for d in comparison.at_first_step()}
    steps = sorted({step for step, _, _ in comparison.grid})
    first = comparison.differences[0] if comparison.differences else None
    for rank in comparison.ranks:
        head = "".join(f"<th scope=col>{step}</th>" for step in steps)
        yield f"<div class=scroll><table><thead><tr><th>rank {rank}, step</th>{head}</tr></thead>"
        for event in EVENTS:
            cells = [comparison.grid.get((step, event.key, rank)) for step in steps]
            if all(cell is None for cell in cells):
                continue
            row = [f"<tr><th scope=row>{_safe(event.title)}</th>"]
            for step, equal in zip(steps, cells, strict=True):
                key = (step, event.key, rank)
                begun = first is not None and (first.step, first.event, first.rank) == key
                row.append(_cell(equal, words.get(key, ""), begun=begun))
            yield "".join(row) + "</tr>"
        yield "</table></div>"


def _cell(equal: bool | None, words: str, *, begun: bool) -> str:
    """Return one cell; a sign says the same as the colour."""
    if equal is None:
        return "<td class=none></td>"
    if equal:
        return "<td class=equal>=</td>"
    said = f" title='{_safe(words)}'" if words else ""
    return f"<td class='differs{' first' if begun else ''}'{said}>&ne;</td>"


def _safe(text: str) -> str:
    return html.escape(text, quote=True)
