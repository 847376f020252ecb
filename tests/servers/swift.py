"""OpenStack Swift with its s3api: a production S3 server that pip alone installs.

One device, one replica, everything on loopback. Its conditional PUT holds in sequence and not
under a race, which is what a careful client must survive.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.servers import one_process
from tests.servers.one_process import KINDS
from tests.servers.process import free_ports, listens, running
from tests.servers.s3 import S3Service

# No test asks for what else it can do, and each filter more costs every request.
_PIPELINE = "catch_errors gatekeeper cache s3api tempauth copy slo proxy-server"
_FILTERS: dict[str, dict[str, str]] = {
    "catch_errors": {},
    "gatekeeper": {},
    "cache": {},
    "s3api": {
        "s3_acl": "no",
        "location": "us-east-1",
        "max_multi_delete_objects": "1000",
        "check_bucket_owner": "false",
        "auth_pipeline_check": "true",
    },
    "tempauth": {"user_test_tester": "testing .admin .reseller_admin"},
    "copy": {},
    "slo": {},
}
_RINGS = """
import sys
from swift.common.ring import RingBuilder
for i, kind in enumerate(("account", "container", "object")):
    ring = RingBuilder(4, 1, 0)
    ring.add_dev(dict(region=1, zone=1, ip="127.0.0.1", port=int(sys.argv[2 + i]), device="sda1",
                      weight=1, replication_ip="127.0.0.1", replication_port=int(sys.argv[2 + i])))
    ring.rebalance()
    ring.get_ring().save(f"{sys.argv[1]}/{kind}.ring.gz")
"""


def _section(name: str, settings: dict[str, str]) -> str:
    return f"[{name}]\n" + "".join(f"{k} = {v}\n" for k, v in settings.items())


def _configure(root: Path) -> None:
    etc = root / "etc"
    etc.mkdir()
    (root / "srv" / "sda1").mkdir(parents=True)
    common = {
        "swift_dir": str(etc),
        "log_level": "WARNING",
        "log_address": "/dev/null",
        "log_requests": "false",
    }
    hashing = {"swift_hash_path_suffix": "t", "swift_hash_path_prefix": "t"}
    policy = {"name": "p0", "default": "yes"}
    (etc / "swift.conf").write_text(
        _section("swift-hash", hashing) + _section("storage-policy:0", policy)
    )
    for kind in KINDS:
        default = common | {
            "devices": str(root / "srv"),
            "mount_check": "false",
            "fallocate_reserve": "0",
        }
        (etc / f"{kind}.conf").write_text(
            _section("DEFAULT", default)
            + _section("pipeline:main", {"pipeline": f"{kind}-server"})
            + _section(f"app:{kind}-server", {"use": f"egg:swift#{kind}"})
        )
    (etc / "proxy.conf").write_text(
        _section("DEFAULT", common)
        + _section("pipeline:main", {"pipeline": _PIPELINE})
        + _section("app:proxy-server", {"use": "egg:swift#proxy", "account_autocreate": "true"})
        + "".join(
            _section(f"filter:{name}", {"use": f"egg:swift#{_egg(name)}"} | settings)
            for name, settings in _FILTERS.items()
        )
    )


def _egg(name: str) -> str:
    return {"cache": "memcache"}.get(name, name)


def _directory() -> Path:
    """Return a new directory whose filesystem keeps extended attributes, in memory if it can."""
    for parent in ("/dev/shm", None):
        if parent and not os.path.isdir(parent):
            continue
        path = Path(tempfile.mkdtemp(prefix="ftckpt-swift-", dir=parent))
        try:
            os.setxattr(path, "user.ftckpt", b"1")
        except OSError:
            path.rmdir()
            continue
        return path
    raise RuntimeError("no filesystem with user extended attributes for Swift")


@contextmanager
def swift_server() -> Iterator[S3Service]:
    """Run Swift and yield how to reach it."""
    root = _directory()
    try:
        (proxy,) = free_ports(1)
        # Nothing listens there: the ring names the servers behind the proxy by them.
        _configure(root)
        behind = [str(root / "etc"), *(str(6200 + number) for number in range(len(KINDS)))]
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _RINGS, *behind], check=True, timeout=60
        )
        command = [sys.executable, "-P", "-W", "ignore", one_process.__file__]
        command += [behind[0], str(proxy), *behind[1:]]
        with running([command], root / "log", lambda: listens(proxy)):
            yield S3Service(f"http://127.0.0.1:{proxy}", "test:tester", "testing")
    finally:
        shutil.rmtree(root, ignore_errors=True)
