"""What recording costs: a training of 25 million parameters on CPU, bare and recorded.

    python benchmarks/replay.py [--tokens 1024] [--rounds 3] [--json]

Each round trains in a fresh process of each kind, in turn: bare, recorded with tensors read every
10 steps, and with tensors read in every step. One thread, so that processor time tells what was
worked whoever else is on the machine; wall time stands beside it. A step's cost is the mean of 20
steps after the second, and a kind's overhead the median over the rounds. What digests cost depends
on the parameters alone and what a step costs on its tokens too, hence `--tokens`.

Then the tensor digest's rate beside that of XXH3 over the same bytes and, where there is a CUDA
device, its rate there beside a copy's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from side_by_side import Contestant, compare, environment, machine, show

from ftckpt.replay.processes import Settings
from ftckpt.replay.run.one_run import environment as recorded

WARM, STEPS = 2, 20
SEQUENCE = 64
KINDS: dict[str, int | None] = {"bare": None, "every 10 steps": 10, "every step": 1}
AIMS = {"every 10 steps": 0.10, "every step": 0.50}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1024, help="in the batch of a step")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds")
    parser.add_argument("--json", action="store_true", help="print JSON documents")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.tokens)
        return
    rounds = [
        {kind: timed(options.tokens, every) for kind, every in KINDS.items()}
        for _ in range(options.rounds)
    ]
    show_overhead(rounds, options.tokens, as_json=options.json)
    rates(as_json=options.json)


def timed(tokens: int, every: int | None) -> dict[str, float]:
    """Return the mean seconds of a step in a fresh process; `every` None records nothing."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        own = environment()
        if every is not None:
            own = recorded(Settings(str(log), every=every), own)
        done = subprocess.run(
            [sys.executable, __file__, "--train", "--tokens", str(tokens)],
            env=own | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        steps = sum(1 for file in log.glob("*.jsonl") for _ in file.open())
        if (steps > STEPS) != (every is not None):
            raise SystemExit(f"{steps} lines were recorded: {done.stderr}")
        seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return seconds


def train(tokens: int) -> None:
    """Train, and print the mean seconds of a step."""
    import torch

    torch.manual_seed(1)
    layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.1, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
    assert 25e6 < sum(p.numel() for p in model.parameters()) < 26e6
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    clocks = {"cpu": time.process_time, "wall": time.perf_counter}
    for step in range(WARM + STEPS):
        if step == WARM:
            begun = {name: clock() for name, clock in clocks.items()}
        loss = model(torch.randn(tokens // SEQUENCE, SEQUENCE, 512)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(json.dumps({name: (clock() - begun[name]) / STEPS for name, clock in clocks.items()}))


def show_overhead(rounds: list[dict[str, dict[str, float]]], tokens: int, *, as_json: bool) -> None:
    """Print seconds a step of each kind, and what recording adds, as a share of the bare step."""
    rows: list[dict[str, Any]] = []
    for kind in KINDS:
        row: dict[str, Any] = {"kind": kind}
        for clock in ("cpu", "wall"):
            row[clock] = [one[kind][clock] for one in rounds]
            row[f"{clock}_overhead"] = statistics.median(
                one[kind][clock] / one["bare"][clock] - 1 for one in rounds
            )
        rows.append(row)
    title = f"recording 25 million parameters, {tokens} tokens a step, one thread"
    if as_json:
        print(json.dumps({"benchmark": title, "machine": machine(), "rows": rows}, indent=1))
        return
    print(f"{title}  ({machine()})")
    print(f"{'tensors read':16}{'cpu s':>9}{'overhead':>10}{'wall s':>9}{'overhead':>10}{'aim':>8}")
    for row in rows:
        cells = [f"{statistics.median(row[c]):9.3f}{row[f'{c}_overhead']:+10.1%}"
                 for c in ("cpu", "wall")]  # fmt: skip
        aim = f"{AIMS[row['kind']]:8.0%}" if row["kind"] in AIMS else ""
        print(f"{row['kind']:16}{''.join(cells)}{aim}")


def rates(*, as_json: bool) -> None:
    """Show how fast bytes are digested, beside what it is held to."""
    import torch
    import xxhash

    from ftckpt.replay.record.tensors import tensor_digest

    tensor = torch.randn(64 << 20)

    def ours() -> int:
        tensor_digest(tensor)
        return tensor.nbytes

    def theirs() -> int:
        xxhash.xxh3_128_digest(tensor.numpy().data)
        return tensor.nbytes

    rows = compare(
        [Contestant("tensor digest", ours, ours=True), Contestant("XXH3-128", theirs)], 3
    )
    show("digest of 256 MiB of float32, one thread", rows, {}, as_json=as_json)
    if not torch.cuda.is_available():
        return
    there = tensor.cuda()

    def ours_there() -> int:
        tensor_digest(there)
        return there.nbytes

    def copied() -> int:
        there.clone()
        torch.cuda.synchronize()
        return there.nbytes

    rows = compare(
        [Contestant("tensor digest", ours_there, ours=True), Contestant("copy", copied)], 5
    )
    show("the same on a CUDA device", rows, {}, as_json=as_json)


if __name__ == "__main__":
    main()
