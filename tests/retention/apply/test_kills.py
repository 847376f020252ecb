"""Kill -9 at every change that apply, undelete and purge make, and look at what is left."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ftckpt.errors import ExitCode
from ftckpt.own_files import SUFFIX
from ftckpt.retention.apply.purge import trashed
from tests.killing import kill_points
from tests.retention.carrying import (
    DAY,
    FORMATS,
    NOW,
    apply_to,
    names_in,
    place_of,
    plan_of,
    purge_in,
    save,
    saved,
    snapshot,
    undelete_in,
)

KEPT = {"step-4", "step-5.pt", "step-5.pt" + SUFFIX}


class Scene:
    """A root that is made anew for each kill, beside what nobody may touch."""

    def __init__(self, path: Path) -> None:
        self.root = path / "root"
        self.outside = path / "outside"
        self.outside.mkdir()
        (self.outside / "precious").write_text("precious")
        self.before_outside = snapshot(self.outside)

    def make(self, prepare: Callable[[Path], object] = lambda root: None) -> None:
        """Make five saves; one holds links that lead out of the root."""
        if self.root.exists():
            shutil.rmtree(self.root)
        self.root.mkdir()
        for name in ("step-1", "step-2.pt", "step-3", "step-4", "step-5.pt"):
            save(self.root, name, int(name[5]))
        (self.root / "step-1/deep/there").symlink_to(self.outside)
        (self.root / "step-3/precious").symlink_to(self.outside / "precious")
        self.all = saved(self.root)
        prepare(self.root)

    def check_outside(self) -> None:
        """Nothing outside the root has changed, in bytes or in times."""
        assert snapshot(self.outside) == self.before_outside

    def check_live(self, least: set[str]) -> None:
        """What has a name in the root is whole, as it was saved, and these are there."""
        now = saved(self.root)
        assert {k: self.all.get(k) for k in now} == now
        live = names_in(self.root)
        assert live >= least
        for name in live - {n for n in live if n.endswith(SUFFIX)}:
            inside = {k for k in self.all if k == name or k.startswith(f"{name}/")}
            assert inside <= now.keys()


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def killed(
    scene: Scene, prepare: Callable[[Path], object], work: Callable[[], object]
) -> Iterator[int]:
    """Yield after each kill, in a scene that was made for it."""

    def run() -> None:
        assert work() is ExitCode.OK

    points = kill_points(run)
    number = 0
    while True:
        scene.make(prepare)
        point = next(points, None)
        if point is None:
            break
        number = point
        scene.check_outside()
        yield number
        scene.check_outside()
    assert number > 5, "hardly anything was tried"


@pytest.mark.parametrize("at_once", [False, True])
def test_apply(scene: Scene, at_once: bool) -> None:
    def work() -> ExitCode:
        return apply_to(scene.root, purge_now=at_once).code

    for _ in killed(scene, lambda root: None, work):
        scene.check_live(KEPT)
        assert work() is ExitCode.OK
        assert names_in(scene.root) == KEPT
        if not at_once:
            back = undelete_in(scene.root, "step-1", "step-2.pt", "step-3")
            assert back.code is ExitCode.OK
            assert saved(scene.root) == scene.all
        purged = purge_in(scene.root, NOW + 2 * DAY)
        assert purged.code is ExitCode.OK
        assert list((scene.root / ".ftckpt/trash").iterdir()) == []


def test_apply_of_one_plan(scene: Scene) -> None:
    scene.make()
    plan = plan_of(scene.root)
    for _ in killed(scene, lambda root: None, lambda: apply_to(scene.root, plan).code):
        assert apply_to(scene.root, plan).code is ExitCode.OK
        assert names_in(scene.root) == KEPT


def test_undelete(scene: Scene) -> None:
    names = ("step-1", "step-2.pt", "step-3")

    def work() -> ExitCode:
        return undelete_in(scene.root, *names).code

    for _ in killed(scene, apply_to, work):
        scene.check_live(KEPT)
        left = [t.name for t in trashed(place_of(scene.root), FORMATS)]
        assert {*left, *names_in(scene.root)} >= {*names, *KEPT}
        assert work() is ExitCode.OK
        assert saved(scene.root) == scene.all


def test_purge(scene: Scene) -> None:
    def work() -> ExitCode:
        return purge_in(scene.root, NOW + DAY).code

    for _ in killed(scene, apply_to, work):
        scene.check_live(KEPT)
        for thing in trashed(place_of(scene.root), FORMATS):
            if thing.erasing:
                refused = undelete_in(scene.root, thing.name)
                assert refused.code in (ExitCode.REFUSED, ExitCode.PARTIAL)
        left = [t.name for t in trashed(place_of(scene.root), FORMATS) if not t.erasing]
        for name in left:  # what an interrupted purge left can be had back, and is whole
            assert undelete_in(scene.root, name).code is ExitCode.OK
        scene.check_live({*KEPT, *left})
        assert work() is ExitCode.OK
        assert list((scene.root / ".ftckpt/trash").iterdir()) == []
