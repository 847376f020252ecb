"""What networks and services break on the way, through a proxy before a real server."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace

import pytest

from ftckpt.checkpoint import Extent
from ftckpt.errors import DeniedError, ExistsError, UnavailableError, UnsupportedError
from ftckpt.storage import StoreOptions, open_store
from ftckpt.storage.s3 import fast_reads
from ftckpt.storage.store import Store
from tests.conformance.stores import Place
from tests.servers.faults import Fault, FaultProxy, fault_proxy
from tests.servers.places import key_of, place_on
from tests.servers.s3 import S3Service

pytestmark = pytest.mark.s3

DATA = hashlib.shake_128(b"data").digest(300_000)
ALWAYS = 1000


@pytest.fixture
def proxy(swift: S3Service) -> Iterator[FaultProxy]:
    with fault_proxy(swift.endpoint) as proxy:
        yield proxy


@pytest.fixture
def direct(swift: S3Service, s3_url: str) -> Place:
    place = place_on(swift, s3_url)
    place.raw_put("x", DATA)
    return place


@pytest.fixture(params=["fast", "ordinary"])
def store(
    request: pytest.FixtureRequest,
    direct: Place,
    proxy: FaultProxy,
    monkeypatch: pytest.MonkeyPatch,
) -> Store:
    """A store whose ranges come past the event loop, all of them or none."""
    least = 1 if request.param == "fast" else 1 << 60
    monkeypatch.setattr(fast_reads, "LEAST", least)
    options = StoreOptions(endpoint=proxy.endpoint, retry_seconds=10, timeout=1)
    return open_store(direct.store.url, options)


@pytest.fixture
def hasty(direct: Place, proxy: FaultProxy) -> Store:
    """A store that gives up soon, for faults that last."""
    options = StoreOptions(endpoint=proxy.endpoint, retry_seconds=0.8, timeout=0.5)
    return open_store(direct.store.url, options)


GET = "^GET .*/x"


@pytest.mark.parametrize(
    "fault",
    [
        Fault(GET, status=503),
        Fault(GET, times=2, status=500, code="InternalError"),
        Fault(GET, status=429),
        Fault(GET, cut="close", at=100_000),
        Fault(GET, cut="reset", at=200_000),
        Fault(GET, cut="reset", at=0),
        Fault(GET, cut="stall", at=150_000),
        Fault(GET, cut="lose"),
    ],
    ids=lambda f: f"{f.status or f.cut}-{f.at}",
)
def test_passing_fault_is_survived(store: Store, proxy: FaultProxy, fault: Fault) -> None:
    proxy.faults = [replace(fault)]  # it counts how often it has come
    with store.open("x") as reader:
        assert reader.read(0, len(DATA)) == DATA
    assert proxy.seen(GET) >= 2


def test_broken_body_goes_on_where_it_broke(store: Store, proxy: FaultProxy) -> None:
    proxy.faults = [Fault(GET, cut="reset", at=200_000)]
    with store.open("x") as reader:
        assert reader.read(0, len(DATA)) == DATA
    assert store.usage().bytes_read == len(DATA)


@pytest.mark.parametrize(
    "fault",
    [
        Fault("GET", ALWAYS, status=503),
        Fault("GET", ALWAYS, cut="reset", at=0),
        Fault("GET", ALWAYS, cut="stall", at=0),
    ],
    ids=lambda f: str(f.status or f.cut),
)
def test_lasting_fault_ends_in_unavailable(hasty: Store, proxy: FaultProxy, fault: Fault) -> None:
    proxy.faults = [fault]
    with pytest.raises(UnavailableError), hasty.open("x") as reader:
        reader.read(0, 10)
    with pytest.raises(UnavailableError):
        hasty.walk()
    assert 2 < proxy.seen("GET") < 40


def test_nobody_listens(direct: Place) -> None:
    nowhere = StoreOptions(endpoint="http://127.0.0.1:9", retry_seconds=0.8, timeout=1)
    store = open_store(direct.store.url, nowhere)
    for attempt in (
        store.walk,
        lambda: store.stat("x"),
        lambda: store.put("y", b""),
        lambda: store.create("y", b""),
        lambda: store.read_many([Extent("x", 0, 1), Extent("y", 0, 1)]),
    ):
        with pytest.raises(UnavailableError):
            attempt()


@pytest.mark.parametrize(("status", "code"), [(403, "AccessDenied"), (400, "ExpiredToken")])
def test_refusal_is_not_tried_again(
    store: Store, proxy: FaultProxy, status: int, code: str
) -> None:
    proxy.faults = [Fault("GET|HEAD", ALWAYS, status=status, code=code)]
    for attempt in (store.walk, lambda: store.open("x"), lambda: store.read("x", 0, 5)):
        with pytest.raises(DeniedError):
            attempt()
    # botocore itself asks once more where a bare 400 could mean another region.
    assert len(proxy.log) <= 5


def test_cut_listing_is_an_error(hasty: Store, proxy: FaultProxy) -> None:
    proxy.faults = [Fault("list-type=2", ALWAYS, cut="close", at=150)]
    with pytest.raises(UnavailableError):
        hasty.walk()


def test_second_page_of_a_listing_fails(
    hasty: Store, direct: Place, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ftckpt.storage.s3.store import S3Store

    for i in range(5):
        direct.raw_put(f"p/{i}", b"")
    assert isinstance(hasty, S3Store)
    call = hasty.client.call

    async def small_pages(operation: str, **parameters: object) -> object:
        return await call(operation, **parameters, MaxKeys=2)  # type: ignore[arg-type]

    monkeypatch.setattr(hasty.client, "call", small_pages)
    proxy.faults = [Fault("continuation-token", ALWAYS, status=503)]
    with pytest.raises(UnavailableError):
        hasty.walk("p")


def test_whole_object_for_a_range_is_noticed(store: Store, proxy: FaultProxy) -> None:
    proxy.faults = [Fault("^GET", ALWAYS, whole=DATA)]
    with store.open("x") as reader:
        with pytest.raises(UnsupportedError, match="range"):
            reader.read(100, 50)
        with pytest.raises(UnsupportedError, match="range"):
            reader.read(0, 50)
        # All of it for the range of all of it is what was asked for.
        assert reader.read(0, len(DATA)) == DATA
    with pytest.raises(UnsupportedError):
        store.read_many([Extent("x", 7, 7)])


def test_flipped_bit_passes_the_transport(store: Store, proxy: FaultProxy) -> None:
    """No client notices it, which is why content is checked by digests and CRCs of its own."""
    proxy.faults = [Fault("^GET", cut="flip", at=1234)]
    with store.open("x") as reader:
        got = reader.read(0, len(DATA))
    assert [i for i, (a, b) in enumerate(zip(got, DATA, strict=True)) if a != b] == [1234]


class TestCreate:
    PUT = "^PUT .*/new"

    def test_lost_answer_is_settled_as_success(
        self, store: Store, direct: Place, proxy: FaultProxy
    ) -> None:
        store.create("probe", b"")
        proxy.faults = [Fault(self.PUT, cut="lose")]
        store.create("new", b"mine")
        assert direct.raw_get("new") == b"mine"
        # aiohttp repeats a PUT on a reused connection by itself, and gets 412 for our own object.
        assert proxy.seen(self.PUT) <= 2

    def test_lost_answer_over_an_existing_key_is_settled_as_failure(
        self, store: Store, direct: Place, proxy: FaultProxy
    ) -> None:
        direct.raw_put("new", b"mine")
        proxy.faults = [Fault(self.PUT, cut="lose")]
        with pytest.raises(ExistsError):
            store.create("new", b"mine")

    def test_request_that_never_arrived_is_sent_again(
        self, store: Store, direct: Place, proxy: FaultProxy
    ) -> None:
        proxy.faults = [Fault(self.PUT, times=2, status=503)]
        store.create("new", b"mine")
        assert direct.raw_get("new") == b"mine"
        assert proxy.seen(self.PUT) == 3

    def test_lost_answers_of_the_probe_do_not_mislead(
        self, store: Store, direct: Place, proxy: FaultProxy
    ) -> None:
        proxy.faults = [Fault("^PUT .*probe", times=2, cut="lose")]
        store.create("new", b"mine")
        assert store.traits.conditional_put is True

    def test_condition_answered_by_a_lying_412(
        self, hasty: Store, direct: Place, proxy: FaultProxy
    ) -> None:
        hasty.create("probe", b"")
        proxy.faults = [Fault(self.PUT, ALWAYS, status=412, code="PreconditionFailed")]
        with pytest.raises(UnavailableError):
            hasty.create("new", b"mine")
        assert direct.raw_get("new") is None


class TestPut:
    def test_lost_answer_and_503(self, store: Store, direct: Place, proxy: FaultProxy) -> None:
        proxy.faults = [Fault("^PUT", cut="lose"), Fault("^PUT", status=503)]
        store.put("y", DATA)
        assert direct.raw_get("y") == DATA

    def test_content_that_arrived_otherwise_is_noticed(
        self, store: Store, direct: Place, proxy: FaultProxy
    ) -> None:
        # The service says yes and keeps what it had.
        direct.raw_put("y", b"old")
        proxy.faults = [Fault("^PUT", status=200, code="")]
        with pytest.raises(UnavailableError):
            store.put("y", b"new")


def test_delete_that_fails_says_so_for_each_key(hasty: Store, proxy: FaultProxy) -> None:
    proxy.faults = [Fault("^POST", ALWAYS, status=503)]
    answer = hasty.delete(["x", "y"])
    assert all(isinstance(error, UnavailableError) for error in answer.values())
    proxy.faults = [Fault("^POST", status=503)]
    assert hasty.delete(["x", "y"]) == {"x": None, "y": None}


def test_key_of_is_below_the_bucket(direct: Place) -> None:
    assert direct.raw_get("x") == DATA
    assert key_of(direct.store.url, "x").endswith("/x")
