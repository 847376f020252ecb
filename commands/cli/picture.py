"""Pictures: one style for all, saved with their numbers beside them.

Matplotlib is the extra `plot`, imported only when a file is asked for.
"""

from __future__ import annotations

import csv
import html
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from ftckpt.errors import ExistsError, UsageError
from ftckpt.packages import needing

from .option_values import check_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".html")

# Okabe and Ito's palette: told apart with every kind of colour vision, and in grey by their order.
BLUE, VERMILION, ORANGE, PURPLE, SKY, GREEN = (
    "#0072B2", "#D55E00", "#E69F00", "#CC79A7", "#56B4E9", "#009E73"
)  # fmt: skip
INK, FAINT = "#222222", "#8A8A8A"

_STYLE: dict[str, Any] = {
    "figure.figsize": (10.0, 5.8),
    "figure.dpi": 100,
    "savefig.dpi": 160,
    "font.size": 12,
    "axes.titlesize": 15,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 12,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "lines.linewidth": 2.2,
    "svg.fonttype": "path",  # the same letters wherever it is opened
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


def save(figure: Figure, path: str, numbers: Mapping[str, Sequence[object]], title: str) -> str:
    """Write a figure, and its numbers as CSV beside it; return the path of the numbers.

    Args:
        figure: inside its `canvas`.
        path: its suffix says the kind; an `.html` page holds picture and numbers by itself.
        numbers: columns of equal length, by heading.
        title: of the page.

    Raises:
        DeniedError, NoResourceError, UnavailableError: it cannot be written.
    """
    from ftckpt.storage.local.atomic import write_over

    kind = os.path.splitext(path)[1].lower().removeprefix(".")
    picture = io.BytesIO()
    # A date would make every picture of the same plan another file.
    metadata = {"Software": None} if kind == "png" else {"Date": None}
    figure.savefig(picture, format="png" if kind == "png" else "svg", metadata=metadata)
    data = picture.getvalue()
    if kind == "html":
        data = _page(data.decode(), numbers, title).encode()
    table = _table_beside(path)
    write_over(path, data)
    write_over(table, csv_text(numbers).encode())
    return table


def _table_beside(picture: str) -> str:
    return os.path.splitext(picture)[0] + ".csv"


def _pictures_of(table: str) -> list[str]:
    return [table.removesuffix(".csv") + suffix for suffix in SUFFIXES]


def csv_text(numbers: Mapping[str, Sequence[object]]) -> str:
    """Return columns as CSV, in full precision; None is an empty field."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(numbers)
    writer.writerows(zip(*numbers.values(), strict=True))
    return out.getvalue()


_PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 1040px; margin: 2em auto;
       padding: 0 1em; }}
svg {{ width: 100%; height: auto; }}
table {{ border-collapse: collapse; font: 13px/1.4 ui-monospace, monospace; }}
th, td {{ text-align: right; padding: .15em .9em; border-bottom: 1px solid #e4e4e4; }}
summary {{ cursor: pointer; margin: 1em 0; }}
</style>
<body>
{svg}
<details><summary>The numbers</summary>
<table>
<tr>{head}</tr>
{rows}
</table>
</details>
</body>
</html>
"""


def _page(svg: str, numbers: Mapping[str, Sequence[object]], title: str) -> str:
    """Return a page that needs no other file and no network."""

    def cells(values: Sequence[object], tag: str) -> str:
        return "".join(f"<{tag}>{html.escape(_shown(value))}</{tag}>" for value in values)

    return _PAGE.format(
        title=html.escape(title),
        svg=svg[svg.index("<svg") :],
        head=cells(list(numbers), "th"),
        rows="\n".join(f"<tr>{cells(r, 'td')}</tr>" for r in zip(*numbers.values(), strict=True)),
    )


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else str(value)
