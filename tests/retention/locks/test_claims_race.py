"""`seal`, `pin` and `tag` against a gc that drops the same checkpoint in that moment.

Whatever comes first, a name stands for a whole checkpoint or for nothing, and who was told that a
checkpoint is kept finds it there. `--campaign full` races a thousand times.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from ftckpt.discovery import resolve as opening
from ftckpt.discovery.listing import open_part
from ftckpt.discovery.roots import Root
from ftckpt.errors import ExitCode, IncompleteError, NotFoundError, RefusedError
from ftckpt.manifest import seal as sealing
from ftckpt.manifest.parse import parse_manifest
from ftckpt.own_files import MANIFEST
from ftckpt.retention.apply.prepare import prepare
from ftckpt.retention.apply.run import apply
from ftckpt.retention.policy import Policy
from ftckpt.retention.records import pins, tags
from ftckpt.storage import StoreOptions, open_store
from tests import campaign
from tests.retention.carrying import FORMATS, HOUR, NOW, apply_to, plan_of, save, undelete_in
from tests.retention.remote_roots import save as save_remote
from tests.retention.test_races import ended, in_a_fork
from tests.servers.places import QUICK

RACES = campaign.examples(12, 1000)
REMOTE = campaign.examples(12, 1000)
SERVED = campaign.examples(2, 100)
TAGGED = Policy(keep_last=1, keep_tags=("milestone",), min_survivors=1)


def root_at(url: str) -> Root:
    return opening.open_root(opening.locate(url, StoreOptions()), FORMATS)


def seal_in(root: Root, name: str = "step-1") -> ExitCode:
    """Seal a checkpoint; it may be gone before it is opened, or while it is sealed."""
    try:
        candidate = next(c for c in root.candidates if c.path == name)
        child = root.recognise(candidate)
        if child is None:
            return ExitCode.NOT_FOUND
        sealing.seal(open_part(root.store, child.part))
    except (NotFoundError, IncompleteError) as error:
        return error.exit_code
    return ExitCode.OK


def pin_in(root: Root, name: str = "step-1") -> ExitCode:
    try:
        pins.pin(root, name, owner="alice", reason="race", now=NOW)
    except NotFoundError as error:
        return error.exit_code
    return ExitCode.OK


def tag_in(root: Root, name: str = "step-1") -> ExitCode:
    try:
        tags.tag(root, name, "milestone", owner="alice", now=NOW)
    except NotFoundError as error:
        return error.exit_code
    return ExitCode.OK


CLAIMS = {"seal": seal_in, "pin": pin_in, "tag": tag_in}


@pytest.mark.parametrize("verb", list(CLAIMS))
def test_local_races(tmp_path: Path, verb: str) -> None:
    choose = Random(verb)
    told: set[tuple[int, bool]] = set()
    for number in range(RACES):
        path = tmp_path / f"root-{number}"
        path.mkdir()
        for step in (1, 2):
            save(path, f"step-{step}", step)
        before = content(path)
        plan = plan_of(path, TAGGED)
        assert list(plan.order) == ["step-1"]
        root = root_at(str(path))
        wait = choose.choice((0, 0.001, 0.003, 0.006, 0.01, 0.02))

        def claim() -> ExitCode:
            time.sleep(wait)  # noqa: B023
            return CLAIMS[verb](root)  # noqa: B023

        child = in_a_fork(claim)
        with suppress(RefusedError):  # stale: it was claimed before the lock was taken
            apply_to(path, plan)
        code = ended(child)
        stands = (path / "step-1").exists()
        told.add((code, stands))
        check_local(path, before, verb, code)
    assert {stands for _, stands in told} == {True, False} or RACES < 100


def content(path: Path) -> dict[str, bytes]:
    """Return the bytes of every file that has a name in the root."""
    files = [p for p in path.rglob("*") if p.is_file() and ".ftckpt" not in p.parts]
    return {str(p.relative_to(path)): p.read_bytes() for p in files}


def check_local(path: Path, before: dict[str, bytes], verb: str, code: int) -> None:
    """Hold what is left to what was there."""
    now = content(path)
    if (path / "step-1").exists():
        assert {k: now.get(k) for k in before} == before
    else:
        assert not [k for k in now if k.startswith("step-1/")]
        assert not (verb in ("pin", "tag") and code == 0), "who was told so finds it there"
        assert undelete_in(path, "step-1").code is ExitCode.OK
        now = content(path)
        assert {k: now.get(k) for k in before} == before
    manifest = now.get(f"step-1/{MANIFEST}")
    if manifest is not None:
        assert {f.path for f in parse_manifest(manifest).files} == {"marker"}


def test_a_directory_that_is_gone_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        save(tmp_path, f"step-{step}", step)
    root = root_at(str(tmp_path))
    real = sealing._require_unchanged

    def dropped_after(*arguments: object) -> None:
        real(*arguments)  # type: ignore[arg-type]
        os.rename(tmp_path / "step-1", tmp_path.parent / "elsewhere")

    monkeypatch.setattr(sealing, "_require_unchanged", dropped_after)
    assert seal_in(root) is ExitCode.INCOMPLETE
    assert not (tmp_path / "step-1").exists()


@pytest.fixture
def switching() -> Iterator[None]:
    """Let threads change places all the time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("switching")
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("verb", list(CLAIMS))
def test_races_on_objects(verb: str, at_once: bool) -> None:
    for number in range(REMOTE):
        race_remotely(f"memory://claims-{verb}-{at_once}-{number}", verb, Random(number), at_once)


@pytest.mark.s3
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("verb", list(CLAIMS))
def test_races_on_s3(s3_url: str, verb: str, at_once: bool) -> None:
    for number in range(SERVED):
        race_remotely(f"{s3_url}/{number}", verb, Random(number), at_once)


def race_remotely(url: str, verb: str, choose: Random, at_once: bool) -> None:
    """Race once; then what has a name is whole, and what is trash goes in one piece."""
    store = open_store(url, QUICK)
    for step in (1, 2):
        save_remote(store, f"step-{step}", step)
    now = time.time() + 9 * HOUR
    place = opening.locate(url, QUICK)
    plan = prepare(place, FORMATS, TAGGED, now).plan
    assert list(plan.order) == ["step-1"]
    keys = {e.path for e in store.walk("step-1")}
    root = opening.open_root(place, FORMATS)
    codes: list[ExitCode] = []
    wait = choose.choice((0, 0, 0.0005, 0.001, 0.002, 0.004))

    def claim() -> None:
        time.sleep(wait if "memory" in url else 20 * wait)
        codes.append(CLAIMS[verb](root))

    thread = threading.Thread(target=claim)
    thread.start()
    with suppress(RefusedError):
        apply(plan, place, FORMATS, actor="me", now=lambda: now, purge_now=at_once)
    thread.join()
    (code,) = codes
    root = opening.open_root(place, FORMATS)
    candidate = next((c for c in root.candidates if c.path == "step-1"), None)
    left = set() if candidate is None else {e.path for e in store.walk("step-1")}
    if candidate is not None and not root.is_dropped(candidate):
        assert left - {f"step-1/{MANIFEST}"} == keys, "half a checkpoint under its name"
        child = root.recognise(candidate)
        assert child is not None
        assert open_part(root.store, child.part).step == 1
        return
    assert not (verb in ("pin", "tag") and code is ExitCode.OK), "who was told so finds it there"
    later = now + 48 * HOUR
    for name in [p for p in left if at_once]:
        assert name == "", f"{name} is left of what was reclaimed"
    from ftckpt.retention.apply.purge import purge

    purged = purge(place, FORMATS, actor="me", now=lambda: later)
    assert purged.code is ExitCode.OK, json.dumps({k: str(v) for k, v in purged.failed.items()})
    assert not purged.held
    with pytest.raises(NotFoundError):
        store.walk("step-1")
