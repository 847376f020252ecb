"""`gc` on an object store, from the command line: codes, and processes that are really killed."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftckpt.storage import open_store
from tests.builders.checkpoints import save_dcp
from tests.faults.cli import Done, command, held, here
from tests.servers.faults import Fault, FaultProxy, fault_proxy
from tests.servers.places import QUICK
from tests.servers.s3 import BUCKET, S3Service, upload_tree

pytestmark = pytest.mark.s3

REPOSITORY = Path(__file__).parents[2]
ALWAYS = 1 << 30
KEEP = ("--keep-last", "2", "--apply")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four checkpoints."""
    place = tmp_path_factory.mktemp("run")
    for step in (1, 2, 3, 4):
        save_dcp(place / f"step-{step}", step=step)
    return place


@pytest.fixture
def url(saved: Path, s3_url: str) -> str:
    upload_tree(saved, s3_url)
    time.sleep(1.1)  # Swift rounds times up to whole seconds: what was saved now is in the future
    return s3_url


@pytest.fixture
def proxy(swift: S3Service, url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    with fault_proxy(swift.endpoint) as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL", running.endpoint)
        yield running


def names(url: str, swift: S3Service) -> set[str]:
    """Return all keys but those of the log, of the cache and of the ledger."""
    store = open_store(url, QUICK._replace(endpoint=swift.endpoint))
    mine = (".ftckpt/log/", ".ftckpt/passed.json", ".ftckpt/verdicts/")
    return {e.path for e in store.walk("") if not e.path.startswith(mine)}


def test_applied_undone_and_reclaimed(url: str, swift: S3Service) -> None:
    before = names(url, swift)
    assert here("gc", url, *KEEP).code == 0
    assert before - names(url, swift) == {"step-1/.metadata", "step-2/.metadata"}
    assert here("latest", url).document["path"] == f"{url}/step-4"
    assert here("verify", f"{url}/step-2").code == 9
    assert here("gc", "undelete", url, "--all").code == 0
    assert names(url, swift) >= before
    assert here("gc", url, *KEEP, "--purge-now", "--yes").code == 0
    assert {name.split("/")[0] for name in names(url, swift)} == {"step-3", "step-4"}


@pytest.mark.parametrize("moment", ["^PUT .*/trash/", "^PUT .*/lock/1.json"])
def test_f6_killed(url: str, swift: S3Service, proxy: FaultProxy, moment: str) -> None:
    before = names(url, swift)
    running: list[subprocess.Popen[bytes]] = []
    proxy.faults = [Fault(moment, then=lambda: running[0].kill())]
    with subprocess.Popen(
        command("gc", url, *KEEP), stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=REPOSITORY
    ) as process:
        running.append(process)
        process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert here("verify", f"{url}/step-4").code == 0
    assert here("verify", f"{url}/step-3").code == 0
    again = here("gc", url, *KEEP)
    held_by = [name for name in names(url, swift) if "/lock/" in name and name.endswith(".json")]
    if held_by:
        assert again.code == 8
        assert "another gc is at work" in again.told
        open_store(url, QUICK).put(held_by[0], b'{"holder": "killed", "seconds": 1e-9}')
        assert _ended(url).code == 0
    else:
        assert again.code == 0
    left = names(url, swift)
    assert {"step-3/.metadata", "step-4/.metadata"} <= left
    assert {name.partition("~")[2] for name in left if "/trash/" in name} == {"step-1", "step-2"}
    assert here("gc", "undelete", url, "--all").code == 0
    assert names(url, swift) >= before


def _ended(url: str) -> Done:
    """Run again until a lease that has ended counts as such: clocks of stores are coarse."""
    for _ in range(20):
        time.sleep(0.8)
        done = here("gc", url, *KEEP)
        if done.code != 8:
            return done
    return done


def test_f7_a_signal_gives_the_lock_back(url: str, swift: S3Service, proxy: FaultProxy) -> None:
    running: list[subprocess.Popen[str]] = []
    proxy.faults = [
        Fault("^PUT .*/trash/", then=lambda: running[0].send_signal(signal.SIGTERM), cut="stall")
    ]
    with subprocess.Popen(
        [*command("gc", url, *KEEP), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    ) as process:
        running.append(process)
        stdout, stderr = process.communicate(timeout=60)
    assert held(process.returncode, stdout, stderr).code == 143
    assert not [name for name in names(url, swift) if "/lock/" in name]
    assert here("gc", url, *KEEP).code == 0


def test_f5_without_permission_to_delete(url: str, swift: S3Service, proxy: FaultProxy) -> None:
    before = names(url, swift)
    proxy.faults = [Fault("^(POST|DELETE)", ALWAYS, status=403, code="AccessDenied")]
    assert here("gc", url, "--keep-last", "2").code == 0
    assert here("gc", url, *KEEP).code == 11
    assert not proxy.seen(r"^HEAD .*/\.ftckpt$")  # an object store has no links to be refused
    left = names(url, swift) - before
    assert all(name.startswith(".ftckpt/lock/") for name in left)


def test_f14_conditions_are_ignored(
    saved: Path, rclone: S3Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    rclone.enter(monkeypatch)
    url = f"s3://{BUCKET}/ignored"
    for file in saved.rglob("*"):
        if file.is_file():
            rclone.put(f"ignored/{file.relative_to(saved)}", file.read_bytes())
    before = names(url, rclone)
    assert here("gc", url, "--keep-last", "2").code == 0
    done = here("gc", url, *KEEP)
    assert done.code == 13
    assert "ignores conditions" in done.told
    assert names(url, rclone) == before


def test_f16_another_gc_is_at_work(url: str, swift: S3Service) -> None:
    record = json.dumps({"holder": "bob@node7", "seconds": 600}).encode()
    open_store(url, QUICK).put(".ftckpt/lock/3.json", record)
    before = names(url, swift)
    done = here("gc", url, *KEEP)
    assert done.code == 8
    assert "bob@node7" in done.told
    assert names(url, swift) == before
