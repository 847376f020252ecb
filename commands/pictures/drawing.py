"""Figures: one style for all, saved with their numbers beside them.

Matplotlib is the extra `plot`, imported only when a file is asked for. An SVG follows the screen,
light or dark, and says in words what it shows; a page keeps the text of its picture readable in a
narrow window.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from ftckpt.commands.cli.render import block, escaped
from ftckpt.errors import ExistsError, UsageError
from ftckpt.packages import needing
from ftckpt.storage.local.writable import check_file

from .palette import DARK, FAINT, GROUND, INK, LINE
from .webpage import page, safe, scrolled, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".html")

_STYLE: dict[str, Any] = {
    "figure.figsize": (10.0, 5.8),
    "figure.dpi": 100,
    "savefig.dpi": 160,
    "font.size": 12,
    "axes.titlesize": 15,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "figure.titlesize": 15,
    "figure.titleweight": "bold",
    "axes.labelsize": 12,
    "axes.edgecolor": FAINT,
    "axes.facecolor": GROUND,
    "figure.facecolor": GROUND,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": LINE,
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "lines.linewidth": 2.2,
    "svg.fonttype": "path",  # the same letters wherever it is opened
    "text.parse_math": False,  # a name with dollars is a name
    "svg.hashsalt": "ftckpt",  # the same input gives the same bytes
}


def check_path(path: str, *, terminal: bool = True) -> None:
    """Refuse a picture that cannot be made, before anything is computed.

    Args:
        path: as given to `--plot`.
        terminal: whether the verb draws on the terminal too, for `-`.

    Raises:
        UsageError: the suffix is none of `SUFFIXES`, or the place is none for a file.
        ExistsError: a file that no picture belongs to stands where the numbers go.
        MissingPackageError: matplotlib is not installed.
    """
    if os.path.splitext(path)[1].lower() not in SUFFIXES:
        raise UsageError(
            f"--plot {path}: the name says no kind of picture",
            hint="name a .png, .svg or .html file" + ", or - for the terminal" * terminal,
        )
    check_file("--plot", path)
    table = _table_beside(path)
    # Drawn again, a picture and its numbers are replaced; numbers without one are somebody else's.
    if os.path.lexists(table) and not any(map(os.path.lexists, _pictures_of(table))):
        raise ExistsError(
            f"{table} exists, and the numbers of --plot {path} go there",
            hint="choose another name for the picture, or move the file away",
        )
    with needing("a picture", "--plot - for the terminal" * terminal):
        import matplotlib  # noqa: F401


@contextmanager
def canvas(**size: Any) -> Iterator[Figure]:
    """Give an empty figure in the common style; it needs no display.

    Args:
        size: arguments of `Figure` that differ from the style's.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context():
        mpl.rcdefaults()  # nobody's own matplotlibrc changes what a picture says
        mpl.rcParams.update(cast(Any, _STYLE))
        yield Figure(layout="constrained", **size)


def save(
    figure: Figure,
    path: str,
    numbers: Mapping[str, Sequence[object]],
    title: str,
    said: str,
    *,
    shown: Mapping[str, Sequence[object]] | None = None,
) -> str:
    """Write a figure, and its numbers as CSV beside it; return the path of the numbers.

    Args:
        figure: inside its `canvas`.
        path: its suffix says the kind; an `.html` page holds picture and numbers by itself.
        numbers: columns of equal length, by heading.
        title: of the picture.
        said: what it shows, in words, for a reader who does not see it.
        shown: what a page has as its table; None for `numbers`.

    Raises:
        DeniedError, NoResourceError, UnavailableError: it cannot be written.
    """
    from ftckpt.storage.local.atomic import write_over

    kind = os.path.splitext(path)[1].lower().removeprefix(".")
    picture = io.BytesIO()
    if kind == "png":
        about = {"Software": None, "Title": block(title), "Description": block(said)}
        figure.savefig(picture, format="png", metadata=about)
        data = picture.getvalue()
    else:
        # A date would make every picture of the same plan another file.
        figure.savefig(picture, format="svg", dpi=100, metadata={"Date": None})
        # Letters that matplotlib took over from a name: XML has no control characters.
        drawn = "\n".join(map(escaped, picture.getvalue().decode().split("\n")))
        text = told(drawn, title, said)
        data = (text if kind == "svg" else _page(text, shown or numbers, title, said)).encode()
    table = _table_beside(path)
    write_over(path, data)
    write_over(table, csv_text(numbers).encode())
    return table


def told(svg: str, title: str, said: str) -> str:
    """Return an SVG that has a title and a description, and turns dark with the screen.

    Colours are replaced by what they are written as in the file, so that a program that knows no
    style sheet shows the light picture.
    """
    rules = "".join(
        f'[style*="{of}: {light.lower()}"]{{{of}:{dark}!important}}'
        for light, dark in DARK.items()
        for of in ("fill", "stroke")
    )
    head, opened, rest = svg.partition("<svg ")
    attributes, closed, inner = rest.partition(">")
    return (
        f'{head}{opened}role="img" aria-labelledby="title said" {attributes}{closed}\n'
        f'<title id="title">{safe(title)}</title><desc id="said">{safe(said)}</desc>\n'
        f"<style>@media (prefers-color-scheme: dark){{{rules}}}</style>{inner}"
    )


def _table_beside(picture: str) -> str:
    return os.path.splitext(picture)[0] + ".csv"


def _pictures_of(table: str) -> list[str]:
    return [table.removesuffix(".csv") + suffix for suffix in SUFFIXES]


def csv_text(numbers: Mapping[str, Sequence[object]]) -> str:
    """Return columns as CSV, in full precision; None is an empty field.

    A spreadsheet computes a text that begins like a formula, so that an apostrophe stands before a
    name that does.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(numbers)
    writer.writerows([*map(_cell, row)] for row in zip(*numbers.values(), strict=True))
    return out.getvalue()


def _cell(value: object) -> object:
    if not isinstance(value, str):
        return value
    return f"'{block(value)}" if value.startswith(("=", "+", "-", "@")) else block(value)


def _page(svg: str, numbers: Mapping[str, Sequence[object]], title: str, said: str) -> str:
    """Return a page that needs no other file and no network."""
    drawn = svg[svg.index("<svg") :]
    # Letters are 12 units high; the picture scrolls in its box where they would be less in pixels.
    width = float(drawn.partition('viewBox="0 0 ')[2].split()[0])
    drawn = drawn.replace(
        "<svg ", f'<svg style="min-width: {width:.0f}px; max-width: {width * 1.5:.0f}px" ', 1
    )
    return page(
        title,
        f"<figure>{scrolled(drawn, title)}<figcaption>{safe(said)}</figcaption></figure>",
        f"<details><summary>The numbers</summary>{table(numbers, title)}</details>",
    )
