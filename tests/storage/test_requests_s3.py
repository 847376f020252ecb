"""How many requests a checkpoint of many small pieces takes where every request has a latency."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ftckpt import convert, diff, open_checkpoint, seal, verify
from ftckpt.delta.pack.assemble import PackOptions
from ftckpt.formats.delta.pack import pack_checkpoint
from ftckpt.storage import StoreOptions
from ftckpt.transfer.layout import LayoutRequest
from tests.servers.faults import FaultProxy, fault_proxy
from tests.servers.s3 import S3Service, upload_tree

pytestmark = pytest.mark.s3

STEPS = Path(__file__).parents[1] / "data" / "dcp" / "fsdp2"
FILES = 4  # of one step, with 53 pieces of tensors and 35 objects
GET = r"^GET .*\.distcp"


@pytest.fixture
def proxy(swift: S3Service, s3_url: str) -> Iterator[FaultProxy]:
    upload_tree(STEPS, s3_url)
    with fault_proxy(swift.endpoint) as proxy:
        yield proxy


@pytest.fixture
def stores(proxy: FaultProxy) -> StoreOptions:
    return StoreOptions(endpoint=proxy.endpoint)


def test_every_piece_is_no_request_of_its_own(
    proxy: FaultProxy, stores: StoreOptions, s3_url: str, tmp_path: Path
) -> None:
    ours, theirs = (f"{s3_url}/step-{n}" for n in (3, 4))

    def passes(act: Callable[[], object]) -> float:
        """Return how often all files of a step were read."""
        proxy.log.clear()
        act()
        return proxy.seen(GET) / FILES

    def reshard() -> None:
        request = LayoutRequest(dp=2)
        assert (
            convert(ours, str(tmp_path / "two"), request=request, stores=stores).proof is not None
        )

    def to_safetensors() -> None:
        out = str(tmp_path / "plain")
        assert convert(ours, out, to="safetensors", stores=stores).proof is not None

    def compare() -> None:
        assert diff(ours, theirs, stores=stores).tensors

    def values() -> None:
        assert verify(ours, level="values", stores=stores).code == 0

    def pack() -> None:
        target, base = (open_checkpoint(url, stores) for url in (theirs, ours))
        out = str(tmp_path / "delta")
        report = pack_checkpoint(target, base, out, options=PackOptions(), store_options=stores)
        assert report.proof is not None

    # One of them, here and below, rehearses the result. One finds where records and pieces lie: of
    # files that are as small as these it reads all, of others their headers.
    assert passes(reshard) <= 9
    assert passes(to_safetensors) <= 10
    assert passes(compare) <= 8  # two steps
    assert passes(values) <= 6
    assert passes(pack) <= 9  # two steps


def test_a_delta_and_its_base_are_read_in_few_requests(
    proxy: FaultProxy, stores: StoreOptions, s3_url: str, tmp_path: Path
) -> None:
    target, base = (open_checkpoint(f"{s3_url}/step-{n}", stores) for n in (4, 3))
    out = f"{s3_url}/delta"
    pack_checkpoint(target, base, out, options=PackOptions(proof=False), store_options=stores)
    proxy.log.clear()
    assert convert(out, str(tmp_path / "plain"), to="safetensors", stores=stores).proof is not None
    assert proxy.seen(GET) <= 20
    assert proxy.seen("^GET .*/delta/") <= 20


def test_a_manifest_costs_the_structure_one_request(
    proxy: FaultProxy, stores: StoreOptions, s3_url: str
) -> None:
    def requests() -> list[str]:
        checkpoint = open_checkpoint(f"{s3_url}/step-3", stores)
        proxy.log.clear()
        assert verify(checkpoint, level="structure").code == 0
        return list(proxy.log)

    bare = len(requests())
    seal(f"{s3_url}/step-3", stores=stores)
    sealed = requests()
    assert len(sealed) == bare + 1
    assert proxy.seen(r"^GET .*/ftckpt\.manifest\.json") == 1
