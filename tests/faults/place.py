"""A small real root, on disk or on a real S3 service, and hands on its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ftckpt.own_files import FOLDER
from tests.faults.cli import Done, here
from tests.servers.faults import FaultProxy
from tests.servers.s3 import BUCKET, S3Service

ALWAYS = 1_000_000
VERBS = ("verify", "inspect", "latest", "seal")
MANIFEST = "ftckpt.manifest.json"


@dataclass
class Place:
    """A root with the checkpoints step-1 and step-2.

    Attributes:
        root: its path or URL.
        service: where it lies; None for a local directory.
        proxy: between the verbs and the service.
        flags: given to every verb.
    """

    root: str
    service: S3Service | None = None
    proxy: FaultProxy | None = None
    flags: list[str] = field(default_factory=list)

    @property
    def newest(self) -> str:
        """Path or URL of the newest checkpoint."""
        return f"{self.root}/step-2"

    @property
    def wire(self) -> FaultProxy:
        """The proxy of a place on a service."""
        assert self.proxy is not None
        return self.proxy

    def words(self, verb: str) -> list[str]:
        """The command line of a verb on this place."""
        if verb == "latest":
            words = ["latest", self.root, "--level", "content", "--stop-at-unsafe"]
            return [*words, *self.flags]
        return [verb, self.newest, *self.flags]

    def key(self, path: str) -> str:
        """Key in the bucket of a path below the root."""
        return f"{self.root.removeprefix(f's3://{BUCKET}/')}/{path}"

    def read(self, path: str) -> bytes:
        if self.service is None:
            return Path(self.root, path).read_bytes()
        data = self.service.get(self.key(path))
        assert data is not None
        return data

    def write(self, path: str, data: bytes) -> None:
        if self.service is None:
            Path(self.root, path).parent.mkdir(parents=True, exist_ok=True)
            Path(self.root, path).write_bytes(data)
        else:
            self.service.put(self.key(path), data)

    def remove(self, path: str) -> None:
        if self.service is None:
            Path(self.root, path).unlink()
        else:
            self.service.client.delete_object(Bucket=BUCKET, Key=self.key(path))

    def flip(self, path: str, at: int) -> None:
        """Flip one bit of a byte; from the end where `at` is negative."""
        data = bytearray(self.read(path))
        data[at] ^= 1
        self.write(path, bytes(data))

    def state(self) -> Mapping[str, object]:
        """Everything that a write would change, but the ledger of verdicts."""
        if self.service is None:
            paths = sorted(p for p in Path(self.root).rglob("*") if FOLDER not in p.parts)
            seen = {str(p): p.lstat() for p in paths}
            return {p: (s.st_size, s.st_mtime_ns, s.st_mode, s.st_ino) for p, s in seen.items()}
        answer = self.service.client.list_objects_v2(Bucket=BUCKET, Prefix=self.key(""))
        listed = answer.get("Contents", ())
        kept = [o for o in listed if f"/{FOLDER}/" not in o["Key"]]
        return {o["Key"]: (o["Size"], o["ETag"], o["LastModified"]) for o in kept}

    def names(self) -> list[str]:
        """Names of the files in the newest checkpoint."""
        return sorted(n.rpartition("/")[2] for n in self.state() if "/step-2/" in n)

    def run(self, verb: str, code: int) -> Done:
        """Run a verb in this process: it ends with `code`, and wrote nothing but a good seal."""
        before = self.state()
        done = here(*self.words(verb))
        assert done.code == code, done.stderr
        if verb == "seal" and code == 0:
            assert MANIFEST in self.names()
            assert here("verify", self.newest, *self.flags).code == 0
        else:
            assert self.state() == before
        return done
