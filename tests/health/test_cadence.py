from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from ftckpt.discovery.resolve import locate, open_root
from ftckpt.errors import NotFoundError
from ftckpt.formats.catalog import FORMATS
from ftckpt.health.cadence import Cadence, Save, SaveGap, cadence, measure
from ftckpt.health.survey import survey
from ftckpt.retention.scan.entry import ScanOptions
from ftckpt.storage import StoreOptions
from tests.commands.golden import RUN


def saves(*rows: tuple[int, float]) -> list[Save]:
    return [Save(f"step-{step}", step, 10, 2, time - 30, time) for step, time in rows]


def test_a_steady_run() -> None:
    found = cadence(saves((100, 1000), (200, 1400), (300, 1800)), "root")
    assert (found.every_steps, found.every_s, found.step_s) == (100, 400, 4)
    assert (found.write_s, found.span_s, found.gaps, found.reason) == (30, 800, (), "")


def test_order_is_by_step_whatever_the_order_of_names() -> None:
    rows = saves((100, 1000), (200, 1400), (300, 1800))
    assert cadence(rows[::-1], "root") == cadence(rows, "root")


def test_a_gap_is_what_the_steps_do_not_explain() -> None:
    found = cadence(saves((100, 0), (200, 400), (300, 1600), (400, 2000), (900, 4000)), "root")
    # The last pair is five times as far apart because saves between were dropped: no gap.
    assert found.gaps == (SaveGap(200, 300, 800.0),)


@pytest.mark.parametrize(
    "rows",
    [
        saves((100, 1000), (200, 1000)),
        saves((100, 1000), (200, 900)),
        [*saves((100, 1000)), Save("b", 200, 10, 2, None, None)],
    ],
)
def test_times_of_a_copy_say_nothing(rows: Sequence[Save]) -> None:
    found = cadence(rows, "root")
    assert found.reason
    assert (found.every_s, found.step_s, found.write_s, found.span_s) == (None,) * 4
    assert found.every_steps == 100


def test_a_slow_copy_writes_one_right_after_the_other() -> None:
    # Two files a save, and as long from the last of one to the first of the next.
    rows = saves((100, 1060), (200, 1120), (300, 1180), (400, 1240))
    found = cadence(rows, "root")
    assert "those of a copy" in found.reason
    assert (found.every_s, found.write_s) == (None, None)
    # One pause is enough for a trainer, and so are too few saves to tell.
    assert cadence([*rows[:3], Save("step-400", 400, 10, 2, 1910, 1940)], "root").every_s == 60
    assert cadence(rows[:3], "root").every_s == 60


def test_one_save_has_no_cadence() -> None:
    found = cadence(saves((100, 1000)), "root")
    assert (found.nbytes, found.write_s, found.every_steps) == (10, 30, None)


def test_one_file_has_no_write_time() -> None:
    assert Save("a.pt", 5, 10, 1, 100.0, 100.0).write_s is None


def measured(path: Path, newest: int = 10) -> Cadence:
    root = open_root(locate(str(path), StoreOptions()), FORMATS)
    return measure(root, newest=newest)


def real_root(tmp_path: Path) -> Path:
    """Make a root of hard links to a real checkpoint, saved every 500 steps and 600 s."""
    for number in range(1, 6):
        folder = tmp_path / f"step-{number * 500}"
        folder.mkdir()
        for order, file in enumerate(sorted((RUN / "step-1").iterdir())):
            (folder / file.name).write_bytes(file.read_bytes())
            time = 1_700_000_000 + 600 * number + order
            os.utime(folder / file.name, (time, time))
    return tmp_path


def test_a_real_root_is_measured_by_listing(tmp_path: Path) -> None:
    root = real_root(tmp_path)
    (root / "step-2500.tmp").mkdir()
    (root / "notes").mkdir()
    files = list((RUN / "step-1").iterdir())
    found = measured(root)
    assert [save.step for save in found.saves] == [500, 1000, 1500, 2000, 2500]
    assert found.nbytes == sum(f.stat().st_size for f in files)
    assert {save.files for save in found.saves} == {len(files)}
    assert (found.every_steps, found.every_s, found.step_s) == (500, 600, 1.2)
    assert found.write_s == len(files) - 1


def test_what_ftckpt_wrote_does_not_count(tmp_path: Path) -> None:
    root = real_root(tmp_path)
    before = measured(root)
    (root / "step-2500" / "ftckpt.manifest.json").write_text("{}")
    assert measured(root) == before


def test_what_comes_long_after_a_save_is_none_of_it(tmp_path: Path) -> None:
    root = real_root(tmp_path)
    before = measured(root)
    for name in ("step-500", "step-1500"):
        (root / name / "eval_results.json").write_text("{}")  # today
    after = measured(root)
    assert [s.finished for s in after.saves] == [s.finished for s in before.saves]
    assert after.every_s == before.every_s
    place = open_root(locate(str(root), StoreOptions()), FORMATS)
    listed = survey(place, ScanOptions(FORMATS, 1_700_010_000.0))
    assert [h.finished for h in listed.held] == [s.finished for s in before.saves]


def test_a_save_with_many_older_files_is_as_new_as_its_weights(tmp_path: Path) -> None:
    root = real_root(tmp_path)
    before = measured(root)
    new = root / "step-2500"
    for number in range(len(list(new.iterdir())) + 1):
        (new / f"tokenizer_{number}.json").write_text("{}")
        os.utime(new / f"tokenizer_{number}.json", (1_600_000_000, 1_600_000_000))
    after = measured(root)
    assert [s.finished for s in after.saves] == [s.finished for s in before.saves]
    place = open_root(locate(str(root), StoreOptions()), FORMATS)
    listed = survey(place, ScanOptions(FORMATS, 1_700_010_000.0))
    assert listed.held[-1].finished == before.saves[-1].finished


def test_only_the_newest_are_listed(tmp_path: Path) -> None:
    found = measured(real_root(tmp_path), newest=2)
    assert [save.step for save in found.saves] == [2000, 2500]


def test_a_root_without_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    with pytest.raises(NotFoundError):
        measured(tmp_path)
