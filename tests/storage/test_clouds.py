"""gs:// and az:// by the real gcsfs and adlfs, on the servers that Google and Microsoft publish."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from ftckpt.storage import StoreOptions, open_store
from ftckpt.storage.store import Store
from tests.conformance.stores import Place, StoreTests
from tests.faults.cli import here
from tests.servers.azure import CONTAINER, azure_environment
from tests.servers.gcs import BUCKET, gcs_environment

pytestmark = [
    pytest.mark.peer,
    # Of gcsfs, which hands the body of a request to aiohttp in one piece.
    pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning"),
]
ORBAX = Path(__file__).parents[1] / "data" / "orbax" / "manager"
CLOUDS: Mapping[str, tuple[str, Callable[[], Mapping[str, str] | None], str]] = {
    "gs": (f"gs://{BUCKET}", gcs_environment, "STORAGE_TESTBENCH is not set, or gcsfs is absent"),
    "az": (f"az://{CONTAINER}", azure_environment, "AZURITE is not set, or adlfs is absent"),
}
_numbers = itertools.count(time.time_ns())


@pytest.fixture(params=CLOUDS)
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    base, environment, absent = CLOUDS[request.param]
    found = environment()
    if found is None:
        pytest.skip(absent)
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    return f"{base}/place-{next(_numbers)}"


class TestClouds(StoreTests):
    @pytest.fixture
    def place(self, url: str) -> Place:
        import fsspec

        scheme, _, base = url.partition("://")
        raw = fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=True)

        def put(path: str, data: bytes) -> None:
            raw.pipe_file(f"{base}/{path}", data)

        def get(path: str) -> bytes | None:
            name = f"{base}/{path}"
            return bytes(raw.cat_file(name)) if raw.exists(name) else None

        return Place(open_store(url, StoreOptions(retry_seconds=1)), put, get)

    def reopen(self, place: Place, path: str) -> Store:
        return open_store(place.store.describe(path), StoreOptions())


def test_a_root_of_orbax_from_disk_and_back(url: str, tmp_path: Path) -> None:
    for step in (20, 30):
        assert here("copy", str(ORBAX / str(step)), f"{url}/run/{step}").code == 0
    found = here("latest", f"{url}/run", "--level", "content")
    assert (found.code, found.document["path"]) == (0, f"{url}/run/30")
    assert here("diff", f"{url}/run/30", str(ORBAX / "30")).code == 0
    assert here("convert", f"{url}/run/30", f"{url}/out", "--to", "safetensors").code == 0
    assert here("diff", f"{url}/out", f"{url}/run/30").code == 0
    words = ("gc", f"{url}/run", "--keep-last", "1", "--min-survivors", "1")
    assert here(*words).code == 0
    assert here(*words, "--apply").code == 0
    assert here("latest", f"{url}/run", "--step-at-most", "20").code == 8  # it is in the trash
    assert here("gc", "undelete", f"{url}/run", "--all").code == 0
    assert here("verify", f"{url}/run/20", "--level", "content").code == 0
    assert here("copy", f"{url}/run/20", str(tmp_path / "20")).code == 0
    assert here("diff", str(tmp_path / "20"), str(ORBAX / "20")).code == 0
    assert here("status", f"{url}/run", "--expect-interval", "1d").code == 0
