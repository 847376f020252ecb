"""Plan gc on a root of a million keys in an object store: requests, time and memory.

    python benchmarks/retention_s3.py [--checkpoints 500] [--keys 2000] [--latency 0] [--json]

The service is made up: a process that answers listings of keys that nobody has stored, in S3's own
form and a thousand a page, so that what is measured is how ftckpt asks. `--latency` seconds are
added to each answer, as a real service takes them.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import time
import urllib.parse
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import side_by_side

PAGE = 1000
MARKER = "marker"


class Server(ThreadingHTTPServer):
    """Answers for `bucket/root/step-N/shard-M` and `bucket/root/step-N/marker`."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, checkpoints: int, keys: int, latency: float) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.checkpoints = checkpoints
        self.keys = keys
        self.latency = latency
        self.start = time.time() - 3600.0 * (checkpoints + 48)

    def saved(self, step: int) -> float:
        """Return when a checkpoint was saved: one an hour."""
        return self.start + 3600.0 * step

    def names(self) -> list[str]:
        """Return the names in the root, sorted as S3 does."""
        return sorted(f"step-{step}" for step in range(1, self.checkpoints + 1))

    def content(self, step: int) -> bytes:
        """Return the marker of a checkpoint."""
        return json.dumps({"step": step, "state": "good"}).encode()


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args: Any) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        """Answer about one object."""
        self._object(with_body=False)

    def do_GET(self) -> None:
        """Answer a listing, or a read."""
        _, _, query = self.path.partition("?")
        asked = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
        if asked.get("list-type") != "2":
            if "uploads" in asked:
                self._send(200, b"<ListMultipartUploadsResult></ListMultipartUploadsResult>")
                return
            self._object(with_body=True)
            return
        time.sleep(self.server.latency)
        first = int(asked.get("continuation-token", "0"))
        items, more = self._page(asked["prefix"], "delimiter" in asked, first)
        token = f"<NextContinuationToken>{first + PAGE}</NextContinuationToken>" if more else ""
        self._send(
            200,
            f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}{items}"
            "</ListBucketResult>".encode(),
        )

    def _page(self, prefix: str, shallow: bool, first: int) -> tuple[str, bool]:
        server = self.server
        if prefix == "root/" and shallow:
            names = server.names()
            page = names[first : first + PAGE]
            items = (f"<CommonPrefixes><Prefix>root/{n}/</Prefix></CommonPrefixes>" for n in page)
            return "".join(items), first + PAGE < len(names)
        if prefix == "root/":
            return self._keys(1, first, min(PAGE, server.keys)), True
        match = re.fullmatch(r"root/step-(\d+)/", prefix)
        if match is None:
            return "", False
        last = min(first + PAGE, server.keys)
        return self._keys(int(match[1]), first, last), last < server.keys

    def _keys(self, step: int, first: int, last: int) -> str:
        saved = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(self.server.saved(step)))
        rest = (
            f"<LastModified>{saved}</LastModified><ETag>&quot;{'0' * 32}&quot;</ETag>"
            "<StorageClass>STANDARD</StorageClass></Contents>"
        )
        size = len(self.server.content(step))
        return "".join(
            f"<Contents><Key>root/step-{step}/{MARKER}</Key><Size>{size}</Size>{rest}"
            if number == 0
            else f"<Contents><Key>root/step-{step}/shard-{number:06}</Key>"
            f"<Size>5000000000</Size>{rest}"
            for number in range(first, last)
        )

    def _object(self, *, with_body: bool) -> None:
        time.sleep(self.server.latency)
        match = re.fullmatch(rf"/bucket/root/step-(\d+)/{MARKER}", self.path.partition("?")[0])
        if match is None:
            self._send(404, b"<Error><Code>NoSuchKey</Code></Error>" if with_body else b"")
            return
        body = self.server.content(int(match[1]))
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        if not with_body or span is None:
            self._send(200, body, with_body=with_body, step=int(match[1]))
            return
        part = body[int(span[1]) : int(span[2]) + 1]
        self._send(206, part, step=int(match[1]), span=f"bytes {span[1]}-{span[2]}/{len(body)}")

    def _send(
        self, status: int, body: bytes, *, with_body: bool = True, step: int = 0, span: str = ""
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{"0" * 32}"')
        self.send_header("Last-Modified", formatdate(self.server.saved(step), usegmt=True))
        if span:
            self.send_header("Content-Range", span)
        self.end_headers()
        if with_body:
            self.wfile.write(body)


def main() -> None:
    """Serve, where asked to; else plan."""
    parser = side_by_side.arguments(__doc__.splitlines()[0], rounds=1)
    parser.add_argument("--checkpoints", type=int, default=500)
    parser.add_argument("--keys", type=int, default=2000, help="of one checkpoint")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds added to each answer")
    parser.add_argument("--serve", action="store_true", help="be the service")
    options = parser.parse_args()
    if options.serve:
        with Server(options.checkpoints, options.keys, options.latency) as server:
            print(server.server_address[1], flush=True)
            server.serve_forever()
        return
    numbers = [str(options.checkpoints), str(options.keys), str(options.latency)]
    names = ("--checkpoints", "--keys", "--latency")
    flags = [word for pair in zip(names, numbers, strict=True) for word in pair]
    command = [sys.executable, __file__, "--serve", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            plan(int(server.stdout.readline()), options)
        finally:
            server.kill()


def plan(port: int, options: Any) -> None:
    """Plan what to keep of the root, and show what it took."""
    from ftckpt.discovery.resolve import locate
    from ftckpt.retention.apply.prepare import prepare
    from ftckpt.retention.policy import DeleteLimit, Policy
    from ftckpt.storage import StoreOptions
    from tests.builders.small_format import Small

    os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    reach = StoreOptions(endpoint=f"http://127.0.0.1:{port}", region="us-east-1")
    policy = Policy(keep_last=3, keep_every=100, max_delete=DeleteLimit(100, percent=True))
    before = time.perf_counter()
    place = locate("s3://bucket/root", reach)
    prepared = prepare(place, [Small()], policy, time.time())
    seconds = time.perf_counter() - before
    requests = place.store.usage().requests
    pages = options.checkpoints * -(-options.keys // PAGE)
    used = {
        "keys": options.checkpoints * options.keys,
        "checkpoints dropped": len(prepared.plan.drop),
        "pages that hold them all": pages,
        "requests": requests,
        "requests a page": round(requests / pages, 3),
        "seconds": round(seconds, 1),
        "keys a second": round(options.checkpoints * options.keys / seconds),
        "peak memory, MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    if options.json:
        print(json.dumps(used))
        return
    for name, value in used.items():
        print(f"{name:28}{value:>14,}")


if __name__ == "__main__":
    main()
