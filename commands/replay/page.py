"""The timeline of a replay as one page that needs nothing else: steps by events, rank by rank.

What differs stands first and open, what is equal below it and folded. The page has no script and
loads nothing, so that it can be kept with a failed job and opened anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

from ftckpt.commands.pictures import webpage
from ftckpt.commands.pictures.webpage import safe as _safe
from ftckpt.findings import counted
from ftckpt.operations.definition import option
from ftckpt.replay.compare.verdict import Verdict
from ftckpt.replay.record.log import BY_KEY, EVENTS
from ftckpt.storage.local.writable import check_file

from .answer import remarks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftckpt.commands.cli.invocation import Invocation
    from ftckpt.replay.compare.differences import Difference
    from ftckpt.replay.compare.logs import Comparison
    from ftckpt.replay.compare.verdict import Judgement


@dataclass(frozen=True, kw_only=True)
class PageOptions:
    """How the answer is drawn."""

    TITLE: ClassVar[str] = "Options"

    html: Annotated[str, option("FILE", "Write the timeline as a page.")] = ""


def check(invocation: Invocation, _: Mapping[str, Any]) -> None:
    """Refuse a page that cannot be written, before anything is done.

    Raises:
        UsageError, RefusedError, DeniedError: what is wrong with the file.
    """
    html = invocation.options(PageOptions).html
    if html:
        check_file("--html", html)


def draw(invocation: Invocation, judgement: Judgement) -> None:
    """Write the page, where one is asked for."""
    html = invocation.options(PageOptions).html
    if html:
        write_page(html, judgement)
        invocation.report(html=html)


# More steps than fit side by side are put together where they are alike.
_SIDE_BY_SIDE = 40
_SIGNS = {Verdict.EXACT: "exact", Verdict.NOT_COMPARED: "open"}

_STYLE = """
h1 { padding-left: .7rem; border-left: .4rem solid var(--on-bad); }
h1.exact { border-color: var(--on-good); } h1.open { border-color: var(--on-warn); }
details { border-top: 1px solid var(--line); }
details details { border: 0; margin-left: 1rem; } details summary { font-weight: 500; }
.grid { border-collapse: separate; border-spacing: 2px; }
.grid th { font-weight: 500; padding: 0 .4rem; }
.grid th[scope=row], .corner { text-align: right; position: sticky; left: 0;
  background: var(--ground); }
.corner { font-weight: 600; } thead .first { color: var(--on-bad); font-weight: 700; }
.grid td { min-width: 1.6rem; height: 1.3rem; text-align: center; border-radius: 3px; }
td.first { outline: 3px solid var(--on-bad); outline-offset: -1px; font-weight: 700; }
"""


class _Column(NamedTuple):
    """Steps that are shown together, and what is known of them by (event, rank)."""

    first: int
    last: int
    cells: dict[tuple[str, int], bool]

    @property
    def label(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}&ndash;{self.last}"


def write_page(path: str, judgement: Judgement) -> None:
    """Write the page of a judgement to a file, replacing what is there.

    Raises:
        RefusedError, DeniedError, NoResourceError, NotFoundError: the file cannot be written.
    """
    from ftckpt.storage.local.atomic import write_over

    write_over(path, page(judgement).encode())


def page(judgement: Judgement) -> str:
    """Return the page: the verdict, what differs first, and a grid for each pair of runs."""
    title, sentence = _safe(judgement.verdict.value), _safe(judgement.sentence)
    sign = _SIGNS.get(judgement.verdict, "unequal")
    parts = [
        f"<h1 class={sign}>{title[:1].upper()}{title[1:]}</h1>",
        f"<p>{sentence[:1].upper()}{sentence[1:]}.</p>",
        *_remarks(judgement),
    ]
    if judgement.comparisons:
        parts.append(
            "<p class=faint>One column a step, one row for what was recorded of it in causal order."
            " Of many steps those that are alike share a column."
            " <b>=</b> equal, <b>&ne;</b> differs, framed: what differs first, grey: not recorded."
        )
    unlike = [one for one in judgement.comparisons if one.differences]
    for comparison in unlike:
        parts += _differing(comparison)
    for comparison in judgement.comparisons:
        if not comparison.differences:  # the restart's is the last one
            shown = not unlike and comparison is judgement.comparisons[-1]
            parts += _equal(comparison, shown=shown)
    return webpage.page(f"ftckpt replay: {judgement.verdict.value}", *parts, style=_STYLE)


def _remarks(judgement: Judgement) -> Iterator[str]:
    rows = remarks(judgement)
    if rows:
        yield "<dl>"
        yield from (f"<dt>{_safe(name)}<dd>{_safe(words)}" for name, words in rows)
        yield "</dl>"


def _differing(comparison: Comparison) -> Iterator[str]:
    first = comparison.differences[0]
    yield f"<h2>{_title(comparison)}: differs from step {first.step}</h2>"
    unequal = comparison.at_first_step
    yield webpage.table(
        {
            f"first, at step {first.step}": [BY_KEY[one.event].title for one in unequal],
            "rank": [one.rank for one in unequal],
            "how": [one.detail for one in unequal],
        },
        "What differs first",
    )
    columns = _columns(comparison, first.step)
    unlike = {d.rank for d in comparison.differences}
    for rank in comparison.ranks:
        if rank in unlike:
            yield from _grid(columns, rank, first)
    alike = [rank for rank in comparison.ranks if rank not in unlike]
    if alike:
        named = f"rank {alike[0]}" if len(alike) == 1 else f"the other {len(alike)} ranks"
        yield f"<details><summary>{named}: equal</summary>"
        for rank in alike:
            yield from _grid(columns, rank, None)
        yield "</details>"


def _equal(comparison: Comparison, *, shown: bool) -> Iterator[str]:
    said = f"equal for {counted(len(comparison.steps), 'step')}"
    if comparison.problems:
        said += ", which shows nothing"
    yield f"<details{' open' if shown else ''}><summary>{_title(comparison)}: {said}</summary>"
    columns = _columns(comparison, None)
    for rank in comparison.ranks:
        yield from _grid(columns, rank, None)
    yield "</details>"


def _title(comparison: Comparison) -> str:
    title = f"{comparison.other} against {comparison.reference}"
    return _safe(title[:1].upper() + title[1:])


def _columns(comparison: Comparison, apart: int | None) -> list[_Column]:
    """Return the columns of a grid; the step `apart` has one of its own.

    Of many steps those that stand together are one column, as far as none of them contradicts
    another: what was not recorded of a step contradicts nothing.
    """
    steps: dict[int, dict[tuple[str, int], bool]] = {}
    for (step, event, rank), equal in comparison.grid.items():
        steps.setdefault(step, {})[event, rank] = equal
    columns: list[_Column] = []
    for step, cells in sorted(steps.items()):
        last = columns[-1] if columns else None
        if (
            last is None
            or len(steps) <= _SIDE_BY_SIDE
            or apart in (step, last.last)
            or any(last.cells.get(key, equal) != equal for key, equal in cells.items())
        ):
            columns.append(_Column(step, step, cells))
        else:
            columns[-1] = _Column(last.first, step, last.cells | cells)
    return columns


def _grid(columns: Sequence[_Column], rank: int, first: Difference | None) -> Iterator[str]:
    head = "".join(
        f"<th scope=col{' class=first' if first and column.first == first.step else ''}>"
        f"{column.label}"
        for column in columns
    )
    lines = [f"<table class=grid><thead><tr><th class=corner>rank {rank}, step{head}</thead>"]
    for event in EVENTS:
        cells = [column.cells.get((event.key, rank)) for column in columns]
        if all(cell is None for cell in cells):
            continue
        row = [f"<tr><th scope=row>{_safe(event.title)}"]
        for column, equal in zip(columns, cells, strict=True):
            here = (column.first, event.key, rank)
            begun = first is not None and here == (first.step, first.event, first.rank)
            row.append(_cell(equal, begun=begun))
        lines.append("".join(row))
    lines.append("</table>")
    yield webpage.scrolled("\n".join(lines), f"Rank {rank}, step by step")


def _cell(equal: bool | None, *, begun: bool) -> str:
    """Return one cell; a sign says the same as the colour."""
    if equal is None:
        return "<td class=none>"
    if equal:
        return "<td class=good>="
    return f"<td class='bad{' first' if begun else ''}'>&ne;"
