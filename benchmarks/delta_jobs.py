"""How much faster two workers pack and unpack than one, whole commands on files.

    python benchmarks/delta_jobs.py [--cache DIR] [--width 256] [--layers 6] [--steps 100]
                                    [--regimes high late tune] [--times 8] [--rounds 3]
                                    [--dir DIR] [--json]

The states of delta.py (a small GPT, trained by the benchmark; `--cache DIR` keeps them), each
tensor `--times` as long, so that they are of a real model's sizes: 0.9 GB a state. `ftckpt delta
pack`, `delta unpack` and `verify` run with `--jobs 1` and `--jobs 2`; and two of them at a time
with one job each, which share nothing: what two processors of this machine allow in that minute.
Seconds are the commands' own: of pack those of choosing and encoding, with the digests of both
sides, and of the proof; of unpack those of verifying, decoding and writing, and of the proof;
verify decodes, and does nothing else. `--dir /dev/shm` keeps disks out of it.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from delta_states import State, arguments, load, make
from side_by_side import ROOT, environment, ftckpt_command, machine, remove, warm, workplace

from ftckpt.checkpoint import Kind
from ftckpt.checkpoint.dtypes import BY_SAFETENSORS

SAFETENSORS = {dtype.name: name for name, dtype in BY_SAFETENSORS.items()}
REGIMES = ("high", "late", "tune")
DISTANCE = 10
ALONE, TWO, BOUND = "one job", "two jobs", "two commands of one job"

# What is measured, by the verb and by the name that its answer has for the seconds.
WHATS = {
    ("pack", "encode"): "pack",
    ("pack", "prove"): "proof",
    ("unpack", "write"): "unpack",
    ("unpack", "prove"): "digests",
    ("verify", ""): "verify",
}
Seconds = Mapping[str, float]


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--regimes", nargs="+", choices=REGIMES, default=REGIMES)
    parser.add_argument("--times", type=int, default=8, help="how long each tensor is made")
    parser.add_argument("--dir", help="where to make the data; a temporary directory by default")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with workplace(options.dir) as place:
        states = nullcontext(options.cache) if options.cache else workplace(None)
        with states as cache:
            make(cache, options.width, options.layers, options.steps)
            if not options.json:
                print(f"two workers, times as fast as one: median, best round  ({machine()})")
                print(f"{'':12}{'':8}{TWO:>24}{BOUND:>30}{'GB/s, one':>14}")
            for regime in options.regimes:
                for row in measured(cache, place, regime, options.times, options.rounds):
                    rows.append(row)
                    if not options.json:
                        show(row)
    if options.json:
        json.dump({"machine": machine(), "rows": rows}, sys.stdout)


def show(row: Mapping[str, Any]) -> None:
    """Print one row as soon as it is measured: all take a quarter of an hour."""
    both = "".join(
        f"{f'{one[0]:.2f}, {one[1]:.2f}':>{width}}"
        for one, width in ((row[TWO], 24), (row[BOUND], 30))
    )
    print(f"{row['state']:12}{row['what']:8}{both}{row['rate']:14.2f}", flush=True)


def measured(
    cache: Path, place: Path, regime: str, times: int, rounds: int
) -> Iterator[dict[str, Any]]:
    """Yield how the steps of one pair of states scale."""
    base, target = (
        written(load(cache / f"{regime}-{step}.safetensors"), place / str(step), times)
        for step in (0, DISTANCE)
    )
    nbytes = sum(file.stat().st_size for file in target.rglob("*.safetensors"))
    warm(place)
    delta = place / "delta"
    lines: dict[str, tuple[str | Path, ...]] = {
        "pack": ("delta", "pack", base, target),
        "unpack": ("delta", "unpack", delta),
        "verify": ("verify", delta),
    }
    seconds: dict[str, dict[str, list[Seconds]]] = {verb: {} for verb in lines}
    for _ in range(rounds):
        for who, count, jobs in ((ALONE, 1, 1), (TWO, 1, 2), (BOUND, 2, 1)):
            for verb, words in lines.items():
                made = 0 if verb == "verify" else count
                outs = [place / f"{verb}-{number}" for number in range(made)]
                for out in outs:
                    remove(out, target)
                took = at_once(words, outs, count, jobs)
                seconds[verb].setdefault(who, []).append(took)
                if verb == "pack" and not delta.exists():
                    (place / "pack-0").rename(delta)
    for (verb, stage), what in WHATS.items():
        taken = {who: [one[stage] for one in all_] for who, all_ in seconds[verb].items()}
        yield {
            "state": f"{regime}, {DISTANCE}",
            "what": what,
            TWO: ratios(taken[ALONE], taken[TWO]),
            BOUND: ratios(taken[ALONE], taken[BOUND]),
            "rate": nbytes / statistics.median(taken[ALONE]) / 1e9,
            "seconds": taken,
        }
    for path in (base, target, delta, *place.glob("*pack-*")):
        shutil.rmtree(path)


def ratios(one: list[float], two: list[float]) -> tuple[float, float]:
    return statistics.median(one) / statistics.median(two), min(one) / min(two)


def at_once(words: Sequence[str | Path], outs: Sequence[Path], count: int, jobs: int) -> Seconds:
    """Run a command so many times at once; return the seconds for each, by stage.

    Args:
        words: of the command.
        outs: what each one makes, where it makes something.
        count: how many.
        jobs: of each.
    """
    line = [*ftckpt_command(), *map(str, words)]
    running = [
        subprocess.Popen(
            [*line, *map(str, outs[number : number + 1]), "--jobs", str(jobs), "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
            env=environment(),
        )
        for number in range(count)
    ]
    said = [json.loads(process.communicate()[0]) for process in running]
    if any(one["result"]["code"] for one in said):
        raise SystemExit(f"{' '.join(line)} ended with {said[0]['result']}")
    took = [one["seconds"] for one in said]
    stages = [each if isinstance(each, dict) else {"": each} for each in took]
    return {stage: max(one[stage] for one in stages) / count for stage in stages[0]}


def written(state: State, place: Path, times: int) -> Path:
    """Write a state as a checkpoint, each tensor so many times as long."""
    import numpy as np
    import torch
    from safetensors.torch import save_file

    files: dict[str, dict[str, torch.Tensor]] = {"model": {}, "optimizer": {}}
    for key, info in state.infos.items():
        raw = torch.from_numpy(np.frombuffer(state.data[key], "u1").copy())
        tensor = raw.view(getattr(torch, info.dtype.name)).view(info.shape)
        name = info.name if info.kind is Kind.PARAM else f"{info.kind.value}.{info.name}"
        whole = torch.cat([tensor] * times) if info.shape else tensor
        files[info.component][name] = whole
    (place / "optimizer").mkdir(parents=True)
    save_file(files["model"], place / "model.safetensors")
    save_file(files["optimizer"], place / "optimizer" / "optimizer.safetensors")
    return place


if __name__ == "__main__":
    main()
