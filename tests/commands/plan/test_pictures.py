"""Pictures of plans: their files, the numbers beside them, and what happens without matplotlib."""

from __future__ import annotations

import csv
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.commands.golden import ftckpt
from tests.json_run import ftckpt_json

WASTE = "plan --mtbf 3h --save 60s --restart 5m"
SWEEP = "plan sweep --over gpus=1k..8k --gpu-mtbf 50000h --save 60s"


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("suffix", ["png", "svg", "html"])
def test_a_picture_and_its_numbers(tmp_path: Path, suffix: str) -> None:
    picture = tmp_path / f"waste.{suffix}"
    answer = ftckpt_json(*shlex.split(WASTE), "--plot", str(picture))
    numbers = tmp_path / "waste.csv"
    assert answer["plot"] == {"file": str(picture), "numbers": str(numbers)}
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([picture.name, numbers.name])
    rows = table(numbers)
    least = min(rows, key=lambda row: float(row["waste"]))
    assert float(least["interval_s"]) == pytest.approx(answer["interval"]["exact_s"])
    assert float(least["waste"]) == pytest.approx(1 - answer["goodput"]["value"], rel=1e-9)
    for row in rows:
        parts = ("save", "lost", "detection", "restart", "waiting")
        assert sum(float(row[part]) for part in parts) == pytest.approx(float(row["waste"]))
    data = picture.read_bytes()
    if suffix == "png":
        assert data.startswith(b"\x89PNG\r\n\x1a\n")
    elif suffix == "svg":
        assert ET.fromstring(data).tag == "{http://www.w3.org/2000/svg}svg"
    else:
        page = data.decode()
        assert "<svg" in page
        assert f"<td class=number>{float(least['interval_s']):.6g}<td" in page


def test_numbers_that_no_picture_goes_with_stay(tmp_path: Path) -> None:
    numbers = tmp_path / "waste.csv"
    numbers.write_text("measured,by,me\n")
    done = ftckpt(*shlex.split(WASTE), "--plot", tmp_path / "waste.png")
    assert (done.returncode, done.stdout) == (8, "")
    assert f"{numbers} exists" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["waste.csv"]
    assert numbers.read_text() == "measured,by,me\n"


def test_a_picture_is_drawn_again_and_as_another_kind(tmp_path: Path) -> None:
    for name in ("waste.svg", "waste.svg", "waste.png"):
        assert ftckpt(*shlex.split(WASTE), "--plot", tmp_path / name).returncode == 0
    assert table(tmp_path / "waste.csv")


def test_a_page_needs_no_network(tmp_path: Path) -> None:
    page = tmp_path / "waste.html"
    assert ftckpt(*shlex.split(WASTE), "--plot", page).returncode == 0
    text = page.read_text()
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!#)""", text)
    assert "<script" not in text
    assert "@import" not in text


def test_the_same_plan_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg", "a.png", "b.png"):
        assert ftckpt(*shlex.split(WASTE), "--plot", tmp_path / name).returncode == 0
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_simulated_points_stand_in_the_numbers(tmp_path: Path) -> None:
    size = "--simulate --runs 20 --set failures-per-run=50"
    done = ftckpt(*shlex.split(f"{WASTE} {size}"), "--plot", tmp_path / "w.png")
    assert done.returncode == 0
    points = [row for row in table(tmp_path / "w.csv") if row["simulated_waste"]]
    assert len(points) == 5
    for row in points:
        error = float(row["simulated_se"])
        assert abs(float(row["simulated_waste"]) - float(row["waste"])) < 5 * error


def test_a_sweep_and_a_heat_map(tmp_path: Path) -> None:
    answer = ftckpt_json(*shlex.split(SWEEP), "--plot", str(tmp_path / "sweep.svg"))
    rows = table(tmp_path / "sweep.csv")
    assert [float(row["gpus"]) for row in rows] == answer["axes"][0]["values"]
    for row, planned in zip(rows, answer["rows"], strict=True):
        assert float(row["goodput as given"]) == planned["goodput"]["value"]
        better = float(row["goodput written in the background, at best"])
        assert better > planned["goodput"]["value"]
    heat = "plan sweep --over mtbf=10m..1d --over save=1s..30m --points 5"
    assert ftckpt(*shlex.split(heat), "--plot", tmp_path / "heat.png").returncode == 0
    cells = table(tmp_path / "heat.csv")
    assert len(cells) == 41 * 41
    # Where the save takes longer than two times between failures there is no plan, and no number.
    assert any(not cell["goodput"] for cell in cells)
    assert all(
        float(cell["save_s"]) < 2 * float(cell["mtbf_s"]) for cell in cells if cell["goodput"]
    )


def test_without_matplotlib_it_is_13_and_the_plan_needs_none(tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text(
        "raise ModuleNotFoundError('blocked by the test', name='matplotlib')\n"
    )
    path = str(tmp_path)
    done = ftckpt(*shlex.split(WASTE), "--plot", tmp_path / "w.png", PYTHONPATH=path)
    assert (done.returncode, done.stdout) == (13, "")
    assert "pip install matplotlib" in done.stderr
    assert not (tmp_path / "w.png").exists()
    assert ftckpt(*shlex.split(WASTE), "--plot", "-", PYTHONPATH=path).returncode == 0


def test_a_plan_imports_nothing_heavy() -> None:
    script = (
        "import sys\nfrom ftckpt.commands.cli.app import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "finally:\n"
        "    heavy = {'numpy', 'matplotlib', 'torch', 'rich', 'fsspec'} & set(sys.modules)\n"
        "    print(sorted(heavy), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *shlex.split(WASTE), "--plot", "-"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr == "[]\n"


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("x")
    done = ftckpt(*shlex.split(WASTE), "--plot", tmp_path / "taken" / "w.png")
    assert done.returncode == 2
    assert f"{tmp_path}/taken is not a directory" in done.stderr
