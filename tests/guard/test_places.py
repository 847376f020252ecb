"""Other places: an object store, a full disk, another number of ranks; and a real verifier."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ftckpt.discovery import root_marker
from ftckpt.errors import ExitCode, NoResourceError, RefusedError, UnavailableError
from ftckpt.guard import lock as guard_lock
from ftckpt.guard.decisions import Limits
from ftckpt.guard.journal import GuardJournal
from ftckpt.guard.lock import held
from ftckpt.guard.terms import GuardSettings
from ftckpt.operations.choosing import read_root
from ftckpt.operations.guarded import GuardChoice, guarded
from ftckpt.operations.opening import STORES
from ftckpt.retention.locks import local
from ftckpt.retention.records import pins
from ftckpt.storage import StoreOptions
from tests.builders.real_sets import real_set
from tests.guard.light_job import QUICK, Job, Listener, quick
from tests.guard.test_processes import until


def run(
    root: str, words: list[str], settings: GuardSettings = QUICK, **choice: Any
) -> tuple[Any, list[str], GuardJournal]:
    said: list[str] = []
    journals: list[GuardJournal] = []
    ended = guarded(
        words, GuardChoice(root, timeout=0.0, **choice), settings, wait_lock=0.0,
        on=Listener(said), told=journals.append,
    )  # fmt: skip
    return ended, said, journals[0]


@pytest.mark.s3
def test_a_bucket_has_a_lease_and_a_log(s3_url: str, supply: Path, tmp_path: Path) -> None:
    from ftckpt.operations.replicating import copy

    root_marker.create_root(s3_url, StoreOptions())
    for step in (1, 2):
        copy(str(supply / f"step-{step}"), f"{s3_url}/step-{step}")
    out = tmp_path / "out"
    words = ["sh", "-c", f'echo "$FTCKPT_RESUME" >> {out}; exit 3']
    ended, _, journal = run(s3_url, words, quick(limits=Limits(2, 0.0, 0.0)))
    assert (ended.code, ended.restarts) == (3, 2)
    # It failed twice from the newest.
    assert out.read_text().split() == [f"{s3_url}/step-{n}" for n in (2, 2, 1)]
    again = GuardJournal(journal.root, print)
    again.load()
    assert [e["event"] for e in again.events].count("start") == 3
    held_pins = pins.pins(read_root(s3_url, STORES))
    assert [(one.entry, one.owner) for one in held_pins] == [("step-1", "ftckpt-guard")]
    with (
        held(journal.root, "somebody@elsewhere", wait=0.0, say=print),
        pytest.raises(RefusedError, match=r"another guard.*somebody@elsewhere"),
    ):
        run(s3_url, words)


def test_a_lease_that_another_guard_took_ends_the_command(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    from contextlib import contextmanager

    from ftckpt.operations import guarded

    began = time.monotonic()

    def check() -> None:
        if job.events("saved") and time.monotonic() > began + 0.2:
            raise RefusedError("the lock was lost: another guard has taken it")

    @contextmanager
    def lost(*args: Any, **kwargs: Any) -> Any:
        yield guard_lock.Hold((), check)

    monkeypatch.setattr(guarded, "held", lost)
    with pytest.raises(RefusedError):
        job.run(3, faults={1: {"hang": 1, "ignore": ["SIGTERM"]}})
    pid = job.events("start")[0]["pid"]
    assert not Path(f"/proc/{pid}").exists()
    assert job.logged("finished")[0]["code"] == 8


def test_a_store_that_is_away_loses_no_lease_before_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Away:
        def check(self) -> None:
            raise UnavailableError("away")

    lock: Any = Away()
    renewal = guard_lock._Renewal(lock)
    renewal.beat()
    renewal.check()
    monkeypatch.setattr(renewal, "_until", time.monotonic() - 1)
    with pytest.raises(RefusedError):
        renewal.beat()
    with pytest.raises(RefusedError, match="could not be renewed"):
        renewal.check()


def test_a_beat_that_does_not_return_loses_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    lock: Any = object()
    renewal = guard_lock._Renewal(lock)
    renewal.check()
    monkeypatch.setattr(renewal, "_until", time.monotonic() - 1)
    with pytest.raises(RefusedError, match="was not renewed"):
        renewal.check()


def test_a_full_disk_without_a_lock_file_is_told(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(local, "twice", full)
    with pytest.raises(NoResourceError):
        job.run()
    assert job.starts() == []


def test_another_number_of_ranks(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path / "run"
    shutil.copytree(real_set("ds_z2_w2_bf16", "", tmp_path_factory), root)
    out = tmp_path / "out"
    words = ["sh", "-c", f'echo "$FTCKPT_RESUME" > {out}; echo "$FTCKPT_ELASTIC" >> {out}']
    ended, said, journal = run(
        str(root), words, world=4, scratch=str(tmp_path / "scratch"), batch=64, lr=1e-3
    )
    assert ended.code == 0, said
    path, told = out.read_text().splitlines()
    assert path.startswith(str(tmp_path / "scratch" / "world4-"))
    elastic = json.loads(told)
    assert (elastic["from"], elastic["to"]) == (2, 4)
    assert elastic["options"][0]["batch"] == 128
    assert any("same-per-gpu" in line for line in said)
    start = next(one for one in journal.own if one["event"] == "start")
    assert (start["path"], start["source"]) == (path, f"{root}/global_step3")
    ended, said, _ = run(str(root), words, world=4, reader=True)
    assert out.read_text().split()[0] == f"{root}/global_step3"
    assert any("Reader loads it as it is" in line for line in said)
    ended, said, _ = run(str(root), words, world=2)
    assert out.read_text().split() == [f"{root}/global_step3"]
    ended, said, _ = run(str(root), words)
    assert ended.code == 0


def test_a_tier_that_holds_the_newest(job: Job, tmp_path: Path) -> None:
    job.have(1)
    tier = tmp_path / "tier"
    tier.mkdir()
    shutil.copytree(job.supply / "step-2", tier / "step-2")
    words = ["sh", "-c", f'echo "$FTCKPT_RESUME" > {tmp_path}/out']
    assert job.run(words=words, choice={"tiers": [str(tier)]}).code == 0
    assert (tmp_path / "out").read_text() == f"{tier}/step-2\n"
    shutil.rmtree(tier)
    ended = job.run(words=words, choice={"tiers": [str(tier)]})
    assert ended.own is ExitCode.MISSING  # it may hold a newer one
    assert job.run(words=words, choice={"tiers": [str(tier)], "allow_missing_tier": True}).code == 0
    assert (tmp_path / "out").read_text() == f"{job.root}/step-1\n"


def test_the_real_program_verifies_in_the_background_and_ends_after_its_command(
    supply: Path, tmp_path: Path, job: Job
) -> None:
    faults = json.dumps({"1": {"hang": 2}})
    line = [sys.executable, "-m", "ftckpt", "guard", str(job.root), "--every", "0.05s"]
    process = subprocess.Popen(
        [*line, "--limit-rate", "1GiB/s", "--", *job.words(3)],
        env=os.environ | {"FAULTS": faults}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    until(
        lambda: (
            any(e["name"] == "OK" and e["step"] == 2 for e in job.logged("verified"))
            if job.events("saved")
            else False
        ),
        60,
    )
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 143, said
    assert "passing SIGTERM on" in said
    held_pins = pins.pins(read_root(str(job.root), STORES))
    assert [one.entry for one in held_pins] == ["step-2"]
    assert job.logged("finished")[0]["code"] == 143
    assert job.run(3, quick()).code == 0
    assert job.starts() == [0, 2]
