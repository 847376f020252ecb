"""What a job script gets from `latest --level content`, for every state of the newest."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

import pytest

from tests.faults.cli import Done, here
from tests.faults.conftest import Answer
from tests.faults.place import ALWAYS, Place
from tests.servers.faults import Fault
from tests.servers.process import free_ports

Install = Callable[[Answer], None]


def corrupt(place: Place, step: str) -> None:
    data = place.read(f"{step}/__0_0.distcp")
    place.write(f"{step}/__0_0.distcp", data[:9000] + bytes(400) + data[9400:])


def short(place: Place, step: str) -> None:
    place.write(f"{step}/__0_1.distcp", place.read(f"{step}/__0_1.distcp")[:-100])


def half_uploaded(place: Place, step: str) -> None:
    place.remove(f"{step}/__0_1.distcp")


def torn(place: Place, step: str) -> None:
    place.remove(f"{step}/.metadata")


def half_uploaded_and_torn(place: Place, step: str) -> None:
    torn(place, step)
    half_uploaded(place, step)


Damage = Callable[[Place, str], None]
STATES: dict[Damage, int] = {
    corrupt: 4,
    short: 4,
    half_uploaded: 4,
    torn: 5,
    half_uploaded_and_torn: 5,
}


def asked(place: Place) -> Done:
    return here(*place.words("latest"))


def test_a_good_root(place: Place) -> None:
    done = asked(place)
    assert (done.code, done.document["path"]) == (0, place.newest)
    assert done.document["skipped"] == []


@pytest.mark.parametrize("damage", STATES)
def test_a_bad_newest_is_walked_over(place: Place, damage: Damage) -> None:
    damage(place, "step-2")
    done = asked(place)
    assert (done.code, done.document["path"]) == (0, f"{place.root}/step-1")
    assert [s["code"] for s in done.document["skipped"]] == [STATES[damage]]
    assert "step-2" in done.stderr


@pytest.mark.parametrize("damage", STATES)
def test_nothing_good(place: Place, damage: Damage) -> None:
    damage(place, "step-2")
    damage(place, "step-1")
    done = asked(place)
    assert done.code == STATES[damage]
    assert done.document["path"] is None


def test_corrupt_outweighs_torn(place: Place) -> None:
    torn(place, "step-2")
    corrupt(place, "step-1")
    assert asked(place).code == 4


def test_nothing_there(place: Place) -> None:
    place.root += "/nowhere"
    assert asked(place).code == 15


def test_a_root_without_checkpoints(place: Place) -> None:
    place.write("logs/train.log", b"step 1\n")
    place.root += "/logs"
    done = asked(place)
    assert done.code == 15  # nothing shows that it is the root of a run
    assert done.document["path"] is None


@pytest.mark.s3
def test_nobody_listens(s3: Place) -> None:
    (port,) = free_ports(1)
    s3.flags += ["--endpoint", f"http://127.0.0.1:{port}"]
    assert asked(s3).code == 10


@pytest.mark.s3
def test_a_wrong_secret(s3: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    assert asked(s3).code == 11


@pytest.mark.s3
def test_a_bucket_that_is_not_there(s3: Place) -> None:
    s3.root = "s3://no-such-bucket/run"
    assert asked(s3).code == 15


@pytest.mark.s3
@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (Fault("GET .*step-2", ALWAYS, status=503), 10),
        (Fault("GET .*step-2", ALWAYS, status=403, code="AccessDenied"), 11),
        (Fault("^GET .*step-2.*distcp", ALWAYS, status=503), 10),
        (Fault("^GET .*step-2.*distcp", ALWAYS, cut="close", at=9), 10),
        (Fault("^GET .*step-2.*distcp", ALWAYS, status=403, code="AccessDenied"), 11),
        (Fault("list-type=2.*step-2", ALWAYS, status=503), 10),
        (Fault("list-type=2.*step-2", ALWAYS, cut="close", at=100), 10),
    ],
    ids=lambda value: f"{value.match}-{value.status}" if isinstance(value, Fault) else "",
)
def test_a_newest_that_cannot_be_reached_stops_the_search(
    s3: Place, fault: Fault, code: int
) -> None:
    fault.times = ALWAYS
    s3.wire.faults = [fault]
    done = asked(s3)
    assert done.code == code, done.stderr
    assert done.document["path"] is None


@pytest.mark.parametrize(
    ("error", "code"), [(errno.EIO, 10), (errno.EACCES, 11), (errno.EMFILE, 12)]
)
@pytest.mark.parametrize("call", ["open", "scandir", "preadv"])
def test_a_newest_that_the_system_refuses_stops_the_search(
    local: Place, system: Install, call: str, error: int, code: int
) -> None:
    def answer(name: str, does: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        if name == call:
            of = given[0] if isinstance(given[0], str) else os.readlink(f"/proc/self/fd/{given[0]}")
            if of.startswith(local.newest):
                raise OSError(error, os.strerror(error))
        return does(*given)

    system(answer)
    done = asked(local)
    assert done.code == code, done.stderr
    assert done.document["path"] is None
