"""A training that needs no torch, and `ftckpt replay run` of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.commands.golden import ftckpt
from tests.test_docs import validate

# A training that says what it computes, saves after step 3 and resumes; FAULT makes it go wrong.
SCRIPT = """
import json, os, struct, sys, time
from pathlib import Path
env = lambda name: int(os.environ["FTCKPT_REPLAY_" + name])
log, state = Path(os.environ["FTCKPT_REPLAY_LOG"]), Path(sys.argv[1] if sys.argv[1:] else ".")
fault, noise = os.environ.get("FAULT", ""), os.urandom(16).hex()
resumed = (state / "saved").exists()
done = int((state / "saved").read_text()) if resumed else 0
assert done == env("AT"), (done, env("AT"))
with (log / "rank-0.jsonl").open("w") as out:
    def put(body):
        out.write(json.dumps(body) + chr(10))
        out.flush()
    put({"log": "ftckpt.replay/1", "rank": 0, "world_size": 1})
    while True:
        done += 1
        if done == 5 and fault == "crash":
            sys.exit("out of memory")
        if done == 7 and fault == "forgets and crashes" and resumed:
            sys.exit("out of memory")
        if done == 5 and fault == "hang":
            time.sleep(600)
        if done == 5 and fault == "short":
            sys.exit(0)
        value = done + (1 if fault.startswith("forgets") and resumed and done > 4 else 0)
        wrong = 1 if fault == "drifts" and resumed and done > 5 else 0
        events = {"params": {"w": f"float32[1]:{done + wrong}"}}
        value += time.time_ns() if fault == "noise" else 0
        loss = "nan" if fault == "nan" and done > 4 else float(value).hex()
        events["loss"] = {"0": "float64 " + loss}
        every, since = env("EVERY"), env("DENSE_FROM")
        if fault == "idle":
            events["rng_start"] = {"python": {"digest": noise}}
        if not every or done < since or (done - since) % every:
            del events["params"]
        put({"step": done, "rank": 0, "events": events})
        if done == env("LOOK_STEP"):
            (log / "values").mkdir()
            head = json.dumps({"dtype": "float32", "shape": [1]}).encode()
            kept = head + b"\\n" + struct.pack("<f", done + wrong)
            (log / "values" / "rank-0-0.bin").write_bytes(kept)
        print("step", done, flush=True)
        if done == 3 and not resumed and fault != "unsaved":
            (state / "saved").write_text("3")
            if env("STOP_AFTER_SAVE"):
                (log / "stopped").write_text("3")
                time.sleep(600)
        if done == 8 and fault == "unsaved":
            sys.exit(0)
        if done == env("LAST"):
            (log / "rank-0.done").touch()
            time.sleep(600)
"""


def replay(script: Path, *arguments: str, fault: str = "") -> dict[str, Any]:
    """Run the trial of a script; its place stands in the command, so the work goes on here."""
    done = ftckpt(
        "replay", "run", "--dir", script.parent / "trial", "--steps", "4", "--json", *arguments,
        "--", sys.executable, script, "{checkpoint}", FAULT=fault,
    )  # fmt: skip
    document = json.loads(done.stdout)
    validate(document)
    assert document["result"]["code"] == done.returncode
    assert isinstance(document, dict)
    return document
