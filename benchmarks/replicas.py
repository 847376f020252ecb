"""Copy a sealed checkpoint, beside `cp -r` on a disk and a plain parallel upload to an S3 service.

    python benchmarks/replicas.py [local|s3] … [--size 2GB] [--rounds 3] [--json] [--s5cmd PATH]

Ours ends with every byte hashed, compared with the manifest, and flushed to the disk; `cp` does
neither, so `cp -r` and then `sync` stands beside it. The plain upload reads each file and puts its
parts from as many threads as ours: what the service itself takes. Its client signs the SHA-256 of
each part, as ours does, and reads no digest of its own. `rclone copy --checksum` and `s5cmd cp`
run as commands, as `ftckpt copy` does, where they are installed. The service is OpenStack Swift's
s3api, started on loopback by the tests' own code; it shares the processors with everyone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import side_by_side
from side_by_side import Contestant, compare, ftckpt_command, peak_memory, warm, workplace

from ftckpt import open_checkpoint, seal
from ftckpt.amounts import size as size_in_bytes
from ftckpt.extents import BLOCK
from ftckpt.replication.copy import copy
from ftckpt.replication.options import ReplicationOptions
from ftckpt.workers import Work
from ftckpt.workers.limits import jobs

_FILES = 8
_REQUESTS = 4


def main() -> None:
    parser = side_by_side.arguments(__doc__.splitlines()[0], size="2GB", rounds=3)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="of local, s3")
    parser.add_argument("--rclone", default="rclone", help="where it is; for s3")
    parser.add_argument("--s5cmd", default="s5cmd", help="where it is; for s3")
    options = parser.parse_args()
    for name in options.cases or CASES:
        with workplace(options.dir) as place:
            source = save(place / "step-1", size_in_bytes(options.size))
            warm(source)
            CASES[name](place, source, options)


def save(path: Path, nbytes: int) -> Path:
    """Save a checkpoint of a few files of random bytes, and seal it."""
    import numpy as np
    from safetensors.numpy import save_file

    path.mkdir()
    random = np.random.default_rng(0)
    for number in range(_FILES):
        data = random.integers(0, 1 << 16, nbytes // _FILES // 2, np.uint16)
        save_file({f"w{number}": data}, path / f"model-{number + 1:05}-of-{_FILES:05}.safetensors")
    _write_index(path)
    seal(str(path), jobs=jobs())
    return path


def _write_index(path: Path) -> None:
    import json

    names = {f"w{n}": f"model-{n + 1:05}-of-{_FILES:05}.safetensors" for n in range(_FILES)}
    index = {"metadata": {}, "weight_map": names}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def _ours(source: Path, to: str, threads: int, *, proof: bool) -> Callable[[], int]:
    def run() -> int:
        how = ReplicationOptions(Work(threads=threads), proof)
        return copy(open_checkpoint(str(source)), to, options=how).nbytes

    return run


def _local(place: Path, source: Path, options: Any) -> None:
    out = place / "out"
    size = sum(f.stat().st_size for f in source.iterdir())

    def run(*command: str) -> Callable[[], int]:
        def call() -> int:
            subprocess.run(
                command, check=True, capture_output=True, env=side_by_side.environment(),
                cwd=side_by_side.ROOT,
            )  # fmt: skip
            return size

        return call

    ours = [*ftckpt_command(), "copy", str(source), str(out)]
    contestants = [
        Contestant("cp -r", run("cp", "-r", str(source), str(out))),
        Contestant("cp -r, then sync", run("sh", "-c", f"cp -r {source} {out}; sync")),
        Contestant("ftckpt, not read back", _ours(source, str(out), jobs(), proof=False)),
        Contestant("ftckpt, in a process", _ours(source, str(out), jobs(), proof=True), ours=True),
        Contestant("ftckpt copy, the command", run(*ours)),
    ]
    clean = partial(side_by_side.remove, out, source)
    extra = {"peak memory of the command, files that it reads included, MiB": peak_memory(*ours)}
    clean()
    rows = compare([replace(c, prepare=clean) for c in contestants], options.rounds)
    side_by_side.show("copy on one disk", rows, extra, as_json=options.json)


def _s3(place: Path, source: Path, options: Any) -> None:
    from tests.servers.s3 import BUCKET
    from tests.servers.swift import swift_server

    with swift_server() as service:
        os.environ.update(service.environment)
        service.client.create_bucket(Bucket=BUCKET)

        def clean() -> None:
            listed = service.client.list_objects_v2(Bucket=BUCKET).get("Contents", ())
            for item in listed:
                service.client.delete_object(Bucket=BUCKET, Key=item["Key"])

        url = f"s3://{BUCKET}/out"
        contestants = [
            Contestant("ftckpt, not read back", _ours(source, url, _REQUESTS, proof=False), True),
            Contestant("ftckpt, read back", _ours(source, url, _REQUESTS, proof=True)),
            Contestant("plain parallel upload", lambda: _upload(service.client, BUCKET, source)),
        ]
        commands, absent = _tools(source, BUCKET, options)
        contestants += [Contestant(name, partial(_run, *words)) for name, words in commands.items()]
        extra = {"left out": ", ".join(absent)} if absent else {}
        rows = compare([replace(c, prepare=clean) for c in contestants], options.rounds)
        side_by_side.show("copy to an S3 service", rows, extra, as_json=options.json)


def _tools(source: Path, bucket: str, options: Any) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """Return what people copy with, as commands, and what of it is not installed."""
    beside = os.pathsep.join((os.environ["PATH"], os.path.dirname(sys.executable)))
    rclone, s5cmd = (shutil.which(name, path=beside) for name in (options.rclone, options.s5cmd))
    ours = (*ftckpt_command(), "copy", str(source), f"s3://{bucket}/command/")
    commands: dict[str, tuple[str, ...]] = {"ftckpt copy, the command, read back": ours}
    at_once = str(_REQUESTS)
    # A remote without a file of settings: the service's variables say the rest.
    os.environ |= {
        "RCLONE_CONFIG_BENCH_TYPE": "s3",
        "RCLONE_CONFIG_BENCH_PROVIDER": "Other",
        "RCLONE_CONFIG_BENCH_ENV_AUTH": "true",
        "RCLONE_CONFIG_BENCH_ENDPOINT": os.environ["AWS_ENDPOINT_URL"],
        "RCLONE_CONFIG_BENCH_REGION": os.environ["AWS_DEFAULT_REGION"],
        "S3_ENDPOINT_URL": os.environ["AWS_ENDPOINT_URL"],
        "AWS_REGION": os.environ["AWS_DEFAULT_REGION"],
    }
    if rclone:
        commands["rclone copy --checksum"] = (
            rclone, "copy", "--checksum", "--config", os.devnull, "--transfers", at_once,
            "--s3-no-check-bucket", "--s3-chunk-size", "64Mi", str(source),
            f"bench:{bucket}/rclone",
        )  # fmt: skip
    if s5cmd:
        commands["s5cmd cp"] = (
            s5cmd, "--numworkers", at_once, "cp", "--part-size", "64", f"{source}/",
            f"s3://{bucket}/s5cmd/",
        )  # fmt: skip
    tools = {"rclone": rclone, "s5cmd": s5cmd}
    return commands, [f"{name} is not installed" for name, path in tools.items() if not path]


def _run(*command: str) -> int:
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=side_by_side.ROOT,
        env=side_by_side.environment(),
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{command[0]} ended with {done.returncode}: {done.stderr[-500:]}")
    return 0


def _upload(client: Any, bucket: str, source: Path) -> int:
    """Put every file in parts of 64 MiB, several at once, and look at nothing afterwards."""
    parts: list[tuple[Path, str, int, int]] = []
    uploads: dict[str, tuple[str, dict[int, str]]] = {}
    for file in sorted(source.iterdir()):
        key, size = f"plain/{file.name}", file.stat().st_size
        if size > BLOCK:
            answer = client.create_multipart_upload(Bucket=bucket, Key=key)
            uploads[key] = answer["UploadId"], {}
        parts += [(file, key, start, size) for start in range(0, size, BLOCK)]

    def put(part: tuple[Path, str, int, int]) -> None:
        file, key, start, size = part
        with file.open("rb") as stream:
            stream.seek(start)
            data = stream.read(BLOCK)
        if size <= BLOCK:
            client.put_object(Bucket=bucket, Key=key, Body=data)
            return
        number, (upload, etags) = start // BLOCK + 1, uploads[key]
        answer = client.upload_part(
            Bucket=bucket, Key=key, UploadId=upload, PartNumber=number, Body=data
        )
        etags[number] = answer["ETag"]

    with ThreadPoolExecutor(_REQUESTS) as pool:
        list(pool.map(put, parts))
    for key, (upload, etags) in uploads.items():
        done = [{"PartNumber": n, "ETag": etag} for n, etag in sorted(etags.items())]
        client.complete_multipart_upload(
            Bucket=bucket, Key=key, UploadId=upload, MultipartUpload={"Parts": done}
        )
    return sum(file.stat().st_size for file in source.iterdir())


CASES: dict[str, Callable[[Path, Path, Any], None]] = {"local": _local, "s3": _s3}


if __name__ == "__main__":
    main()
