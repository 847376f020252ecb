"""Ceph's radosgw, where it is installed: the real server whose conditional PUT holds in a race.

One monitor, one OSD in memory, one gateway, no authentication between them, all on loopback. What
took finding out: a gateway without authentication needs `ms mon client mode = crc`, a monitor map
with version 2 addresses only, and `tcp_nodelay`, without which each request takes 40 ms.
"""

from __future__ import annotations

import shutil
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.servers.process import free_ports, listens, running
from tests.servers.s3 import S3Service

_CONFIG = """
[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{mon}/0]
ms bind msgr1 = false
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pgp num = 4
osd crush chooseleaf type = 0
mon warn on pool no redundancy = false
mon allow pool size one = true
osd pool default pg autoscale mode = off
run dir = {root}/run
admin socket = {root}/run/$name.$pid.asok
log file = {root}/log/$name.log
pid file = {root}/run/$name.pid
keyring = /dev/null
setuser match path =
mon data = {root}/mon
osd data = {root}/osd
osd objectstore = memstore
memstore device bytes = 1073741824
memstore page set = false
mon osd full ratio = 0.95
mon osd nearfull ratio = 0.90
mon osd backfillfull ratio = 0.92
[client.rgw]
ms mon client mode = crc
auth client required = none
rgw frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
rgw thread pool size = 32
rgw data = {root}/rgw
rgw verify ssl = false
rgw dns name = localhost
rgw run sync thread = false
"""
_KEY, _SECRET = "AKIATEST", "SECRETSECRET"


@contextmanager
def radosgw_server(root: Path) -> Iterator[S3Service | None]:
    """Run it and yield how to reach it; yield None where it is not installed."""
    if not all(map(shutil.which, ("radosgw", "ceph-mon", "ceph-osd", "monmaptool"))):
        yield None
        return
    mon, port = free_ports(2)
    fsid = str(uuid.uuid4())
    for name in ("mon", "osd", "run", "log", "rgw"):
        (root / name).mkdir()
    config = root / "ceph.conf"
    config.write_text(_CONFIG.format(fsid=fsid, root=root, mon=mon, port=port))
    conf = ["-c", str(config)]

    def tool(*command: str) -> None:
        subprocess.run(command, check=True, capture_output=True, timeout=60)

    tool("monmaptool", "--create", "--fsid", fsid, "--addv", "a", f"[v2:127.0.0.1:{mon}]",
         str(root / "monmap"))  # fmt: skip
    tool("ceph-mon", *conf, "--mkfs", "-i", "a", "--monmap", str(root / "monmap"),
         "--keyring", "/dev/null")  # fmt: skip
    with ExitStack() as stack:

        def daemon(command: Sequence[str], wait: int | None) -> None:
            log = root / "log" / f"{command[0]}.out"
            ready = (lambda: listens(wait)) if wait else (lambda: True)
            stack.enter_context(running([command], log, ready))

        daemon(["ceph-mon", *conf, "-i", "a", "-f"], mon)
        osd = str(uuid.uuid4())
        tool("ceph", *conf, "osd", "new", osd)
        tool("ceph-osd", *conf, "-i", "0", "--mkfs", "--osd-uuid", osd)
        daemon(["ceph-osd", *conf, "-i", "0", "-f"], None)
        daemon(["radosgw", *conf, "-n", "client.rgw", "-f"], port)
        tool("radosgw-admin", *conf, "-n", "client.rgw", "user", "create", "--uid=t",
             "--display-name=t", f"--access-key={_KEY}", f"--secret-key={_SECRET}")  # fmt: skip
        yield S3Service(f"http://127.0.0.1:{port}", _KEY, _SECRET)
