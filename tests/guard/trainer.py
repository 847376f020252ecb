"""A training of the standard library alone, which starts in milliseconds, for many restarts.

    trainer.py SUPPLY LOG ROOT LAST [--resume PATH]

"Saving" step k copies `SUPPLY/step-k` to ROOT in pieces, the manifest last. Everything it meets is
appended to LOG: what it started from, which steps were intact then, and whether another training
was at work. FAULTS, a JSON object by attempt number, says how each attempt ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

MANIFEST = "ftckpt.manifest.json"
supply, log, root, last = (Path(a) for a in sys.argv[1:5])
fault = json.loads(os.environ.get("FAULTS", "{}")).get(os.environ.get("FTCKPT_ATTEMPT", ""), {})
operations = 0


def tell(**fields: object) -> None:
    with open(log, "a") as file:
        file.write(json.dumps({"pid": os.getpid(), **fields}) + "\n")


def operation() -> None:
    """Count one change of the disk, and die at the chosen one."""
    global operations
    operations += 1
    if operations == fault.get("kill"):
        os.kill(os.getpid(), signal.SIGKILL)


def intact(step: Path) -> bool:
    source = supply / step.name
    return source.is_dir() and all(
        (step / one.name).is_file() and (step / one.name).read_bytes() == one.read_bytes()
        for one in source.iterdir()
    )


def save(number: int, *, flip: bool = False) -> None:
    source, target = supply / f"step-{number}", root / f"step-{number}"
    operation()
    (target / MANIFEST).unlink(missing_ok=True)
    target.mkdir(exist_ok=True)
    for name in sorted(os.listdir(source), key=lambda n: n == MANIFEST):
        data = (source / name).read_bytes()
        if flip and name != MANIFEST:
            data = data[:-1] + bytes([data[-1] ^ 1])
        with open(target / f".{name}.tmp", "wb") as file:
            half = len(data) // 2
            file.write(data[:half])
            file.flush()
            operation()
            file.write(data[half:])
        operation()
        os.replace(target / f".{name}.tmp", target / name)
    operation()
    tell(event="flipped" if flip else "saved", step=number)


def main() -> int:
    lock = os.open(f"{log}.lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        tell(event="TWICE")
        return 99
    resume = sys.argv[6] if len(sys.argv) > 6 else None
    assert resume == os.environ.get("FTCKPT_RESUME"), (resume, os.environ.get("FTCKPT_RESUME"))
    steps = sorted(int(p.name[5:]) for p in root.glob("step-*") if intact(p))
    start = int(Path(resume).name[5:]) if resume else 0
    tell(event="start", step=start, good=steps, attempt=os.environ.get("FTCKPT_ATTEMPT"))
    for name in fault.get("ignore", []):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    if fault.get("fork"):
        # A child that leaves the group and the session, and a grandchild whose parent ends.
        subprocess.Popen(["sleep", "300"], start_new_session=True)
        subprocess.run(["sh", "-c", "sleep 301 & exit 0"], check=True)
    if fault.get("load"):
        print(fault.get("words", ""), file=sys.stderr, flush=True)
        return int(fault["load"])
    if fault.get("hang") == "load":
        time.sleep(300)
    for number in range(start + 1, int(str(last)) + 1):
        time.sleep(fault.get("pace", 0))
        save(number, flip=fault.get("flip") == number)
        if fault.get("exit_after") == number:
            return int(fault.get("code", 1))
        if fault.get("hang") == number:
            time.sleep(300)
    return 0


sys.exit(main())
