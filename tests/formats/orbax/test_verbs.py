"""Every verb on a root of Orbax, on disk and on a real S3 service."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import ftckpt
from ftckpt.errors import ExitCode
from tests.faults.cli import here
from tests.servers.s3 import BUCKET, S3Service, upload_tree

DATA = Path(__file__).parents[2] / "data" / "orbax" / "manager"


class Root:
    """A root of three steps, the last of which is being written; and room beside it."""

    def __init__(self, made: Path, url: str, service: S3Service | None) -> None:
        self._made, self._service = made, service
        self.url = f"{url}/root"
        self.beside = url
        if service is not None:
            upload_tree(made, self.url)

    def write(self, path: str, data: bytes | None) -> None:
        """Replace a file, or take it away."""
        if self._service is not None:
            key = f"{self.url.removeprefix(f's3://{BUCKET}/')}/{path}"
            if data is None:
                self._service.client.delete_object(Bucket=BUCKET, Key=key)
            else:
                self._service.put(key, data)
        elif data is None:
            (self._made / path).unlink()
        else:
            (self._made / path).write_bytes(data)


@pytest.fixture(params=["disk", pytest.param("s3", marks=pytest.mark.s3)])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Root:
    made = tmp_path / "root"
    shutil.copytree(DATA, made)
    unfinished = made / "40"
    shutil.copytree(DATA / "30", unfinished)
    (unfinished / "commit_success.txt").unlink()  # as a save to gs:// looks until it is done
    metadata = json.loads((unfinished / "_CHECKPOINT_METADATA").read_text())
    (unfinished / "_CHECKPOINT_METADATA").write_text(
        json.dumps(metadata | {"commit_timestamp_nsecs": None})
    )
    (unfinished / "state" / "_METADATA").unlink()
    if request.param == "disk":
        return Root(made, str(tmp_path), None)
    url = request.getfixturevalue("s3_url")
    return Root(made, url, request.getfixturevalue("swift"))


def test_every_verb(root: Root) -> None:
    at = root.url
    assert here("inspect", f"{at}/30").document["format"] == "orbax"
    assert here("verify", f"{at}/40").code == 5
    assert here("verify", f"{at}/30").code == 0
    # Orbax's chunks have no checksum: content counts as checked when it is sealed.
    found = here("latest", at, "--level", "content")
    assert (found.code, "40" in found.stderr) == (6, True)
    for step in (20, 30):
        assert here("seal", f"{at}/{step}").code == 0
    found = here("latest", at, "--level", "content")
    assert found.code == 0
    assert str(found.document["path"]).endswith("/30")
    assert ftckpt.diff(f"{at}/20", f"{at}/30").code is ExitCode.DIFFERENT
    on_s3 = at.startswith("s3:")
    if not on_s3:  # on a service the same readers and writers take a hundred requests
        assert here("delta", "pack", f"{at}/20", f"{at}/30", f"{root.beside}/d30").code == 0
        assert here("diff", f"{root.beside}/d30", f"{at}/30").code == 0
    assert here("copy", f"{at}/30", f"{root.beside}/replica/30").code == 0
    assert here("verify", f"{root.beside}/replica/30", "--level", "content").code == 0
    if not on_s3:  # there, a conversion is the next test's
        out = f"{root.beside}/converted/30"
        assert here("convert", f"{at}/30", out, "--to", "orbax").code == 0
        assert here("diff", out, f"{at}/30").code == 0
    node = next((DATA / "30" / "state" / "d").iterdir())
    root.write(f"30/state/d/{node.name}", node.read_bytes()[:-1] + b"\0")
    assert here("verify", f"{at}/30").code == 4
    found = here("latest", at, "--level", "content")
    assert (found.code, str(found.document["path"]).endswith("/20")) == (0, True)
    repair = ("repair", f"{at}/30", "--from", f"{root.beside}/replica/30")
    if on_s3:  # no name of an object store is given to other bytes
        assert here(*repair, "--to", f"{root.beside}/mended/30").code == 0
        assert here("verify", f"{root.beside}/mended/30", "--level", "content").code == 0
        root.write(f"30/state/d/{node.name}", node.read_bytes())
    else:
        assert here(*repair).code == 0
        # `latest` remembers that 20 was read, so gc keeps it until the ledger knows as much of 30.
        assert here("verify", f"{at}/30", "--level", "content", "--remember").code == 0
    assert here("gc", at, "--keep-last", "1").code == 8
    words = ("gc", at, "--keep-last", "1", "--min-survivors", "1", "--apply")
    assert here(*words).code == 0
    # On an object store its marker is gone, and its other keys until the trash is purged.
    assert here("verify", f"{at}/20").code == 9
    assert here("gc", "undelete", at, "--all").code == 0
    assert here("verify", f"{at}/20", "--level", "content").code == 0
    assert here("status", at).code == 0


def test_a_chunk_that_is_missing_is_4(root: Root) -> None:
    at, out = root.url, f"{root.beside}/plain/30"
    assert here("convert", f"{at}/30", out, "--to", "orbax").code == 0
    lost = Root.__new__(Root)
    lost.__dict__ |= root.__dict__ | {"url": out, "_made": Path(out)}
    lost.write("state/params.whole/0.0", None)
    lost.write("ftckpt.manifest.json", None)
    found = here("verify", out)
    assert found.code == 4
    assert "missing-file" in found.kinds
