"""One look for all pictures and pages: colours, words for who does not see them, size of text."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ftckpt.commands.diff.picture import draw as draw_diff
from ftckpt.commands.pictures import palette, webpage
from ftckpt.commands.plan.pictures import HeatMap, heat_picture
from ftckpt.comparison.report import Cell

pytest.importorskip("matplotlib")
SVG = "{http://www.w3.org/2000/svg}"


def compared(layers: int) -> Any:
    """Return what `diff` draws of a report: many layers of which the last changed most."""
    parts = ("weights", "exp_avg")
    cells = [Cell(f"layers.{n}", p, (n + 1) / layers, 1.0) for n in range(layers) for p in parts]
    cells[0] = Cell("layers.0", "weights", 0.0, 0.0)
    return SimpleNamespace(cells=cells, components=[SimpleNamespace(name=p) for p in parts])


def diff(path: Path, layers: int = 12) -> None:
    draw_diff(compared(layers), str(path), "step-1 and <step-2>")


def heat(path: Path) -> None:
    line = [60.0 * 1.2**n for n in range(41)]
    goodput = [[0.5 + n / 100 for n in range(41)] for _ in line]
    heat_picture(
        HeatMap("goodput", ("save", "failure"), ("save_s", "mtbf_s"), line, line, None, None,
                goodput, goodput), str(path),
    )  # fmt: skip


@pytest.mark.parametrize("drawn", [diff, heat])
def test_an_svg_is_said_in_words_and_turns_dark(
    drawn: Callable[[Path], None], tmp_path: Path
) -> None:
    drawn(tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    svg = ET.fromstring(text)
    assert svg.get("role") == "img"
    ids = {child.get("id"): child.text for child in svg}
    title, said = (ids[name] for name in str(svg.get("aria-labelledby")).split())
    assert title
    assert said is not None
    assert len(said) > 40
    style = next(child for child in svg if child.tag == f"{SVG}style").text or ""
    assert "prefers-color-scheme: dark" in style
    # Every colour of the ground and the letters has its dark one.
    for light in (palette.GROUND, palette.INK):
        assert f"fill: {light.lower()}" in text.partition("</style>")[2]
        assert f'[style*="fill: {light.lower()}"]{{fill:{palette.DARK[light]}!important}}' in style


@pytest.mark.parametrize("drawn", [diff, heat])
def test_the_letters_of_a_page_never_get_smaller_than_twelve_pixels(
    drawn: Callable[[Path], None], tmp_path: Path
) -> None:
    drawn(tmp_path / "a.html")
    text = (tmp_path / "a.html").read_text()
    units = float(re.findall(r'viewBox="0 0 ([\d.]+)', text)[0])
    least = float(re.findall(r"<svg style=\"min-width: (\d+)px", text)[0])
    letters = [float(scale) for scale in re.findall(r"scale\(([\d.]+) -[\d.]+\)", text)]
    assert letters
    assert min(letters) * 100 * least / units > 11.95
    assert re.search(r"<div class=scroll role=region tabindex=0 aria-label=\"[^\"]+\"><svg", text)
    assert webpage.POLICY in text
    assert "<script" not in text
    assert "<step-2>" not in text


def test_a_heat_map_of_many_layers_stays_small_and_loses_no_number(tmp_path: Path) -> None:
    diff(tmp_path / "a.html", 6000)
    assert (tmp_path / "a.html").stat().st_size < 500_000
    assert len((tmp_path / "a.csv").read_text().splitlines()) == 1 + 12_000
    page = (tmp_path / "a.html").read_text()
    # What changed most stands first, and a row shows the most of its layers.
    first = page.partition("<tbody>")[2].partition("\n")[0]
    assert first == "<tr><td>layers.5999<td>weights<td class=number>1<td class=number>1"
    assert "the first 1,000 of 12,000 rows" in page
    assert "43 layers share a row, which shows the largest change among them" in page


def test_the_heat_map_of_a_plan_stays_small(tmp_path: Path) -> None:
    heat(tmp_path / "a.html")
    assert (tmp_path / "a.html").stat().st_size < 800_000


# --- colours ------------------------------------------------------------------------------------


def _linear(colour: str) -> tuple[float, float, float]:
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
                        for c in channels)  # fmt: skip
    return red, green, blue


def contrast(one: str, other: str) -> float:
    """Return the contrast of WCAG 2.2."""
    lights = sorted(
        0.2126 * red + 0.7152 * green + 0.0722 * blue
        for red, green, blue in (_linear(one), _linear(other))
    )
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def variables() -> list[dict[str, str]]:
    """Return the colours of a page in light and in dark."""
    light, dark = re.findall(r":root \{([^}]*)\}", webpage.STYLE)
    tables = [dict(re.findall(r"--([\w-]+): (#\w+)", text)) for text in (light, dark)]
    return [
        {name: c if len(c) == 7 else "#" + "".join(2 * d for d in c[1:]) for name, c in t.items()}
        for t in tables
    ]


@pytest.mark.parametrize("screen", [0, 1], ids=["light", "dark"])
def test_text_can_be_read(screen: int) -> None:
    colours = variables()[screen]
    for text, ground in (("ink", "ground"), ("faint", "ground"), ("ink", "none"),
                         *((f"on-{name}", name) for name in ("good", "bad", "warn"))):  # fmt: skip
        assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    assert contrast(colours["focus"], colours["ground"]) >= 3


def test_lines_stand_off_a_dark_ground() -> None:
    for colour in (palette.BLUE, palette.VERMILION, palette.ORANGE, palette.PURPLE, palette.GREEN):
        seen = palette.DARK.get(colour, colour)
        assert contrast(seen, palette.DARK[palette.GROUND]) >= 3, colour


@pytest.mark.parametrize("screen", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize(
    "matrix",
    [
        # Machado, Oliveira, Fernandes 2009, severity 1, on linear light.
        ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216),
         (-0.003882, -0.048116, 1.051998)),
        ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413),
         (-0.011820, 0.042940, 0.968881)),
        ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602),
         (0.004733, 0.691367, 0.303900)),
    ],
    ids=["protanopia", "deuteranopia", "tritanopia"],
)  # fmt: skip
def test_the_colour_blind_tell_the_colours_apart(
    matrix: tuple[tuple[float, ...], ...], screen: int
) -> None:
    """No two are nearer than 8 in CIE L*a*b*, of which 2 are seen side by side."""
    lines = [palette.BLUE, palette.VERMILION, palette.ORANGE, palette.PURPLE, palette.SKY]
    shown = [palette.DARK.get(c, c) if screen else c for c in lines]
    fields = [variables()[screen][name] for name in ("good", "bad", "none")]
    for group in (shown, fields):
        for one, other in combinations(group, 2):
            distance = sum((a - b) ** 2 for a, b in zip(_lab(one, matrix), _lab(other, matrix),
                                                        strict=True)) ** 0.5  # fmt: skip
            assert distance > 8, (one, other, distance)


def _lab(colour: str, matrix: tuple[tuple[float, ...], ...]) -> tuple[float, float, float]:
    seen = [max(0.0, sum(m * c for m, c in zip(row, _linear(colour), strict=True)))
            for row in matrix]  # fmt: skip
    red, green, blue = seen
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089
    fx, fy, fz = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)
