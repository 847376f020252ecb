"""Diff of two checkpoints against `cmp` over the same bytes.

    python benchmarks/diff.py [--size 2GB] [--rounds 5] [--json]

Two checkpoints of `--size` each, in safetensors, which records no checksum: nothing is summed up
beside the comparison. All is read from a warm page cache. `cmp` is given pairs of files, as many at
a time as we have threads, and one after the other. It stops at the first byte that differs, so it
has a time for equal files alone. Of files that changed our own rates are shown: float32 of which
one element in a thousand changed, all of float32, all of bfloat16.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import side_by_side
from side_by_side import Contestant, compare, environment, ftckpt_command, warm, workplace

from ftckpt.amounts import size as size_in_bytes
from ftckpt.comparison import Choice, DiffReport, Reading, Vocabulary
from ftckpt.comparison import compare as compare_checkpoints
from ftckpt.discovery.resolve import open_target
from ftckpt.formats.catalog import FORMATS
from ftckpt.formats.state.fields import state_fields
from ftckpt.storage import StoreOptions
from ftckpt.transfer.content import Content
from ftckpt.workers import Work
from ftckpt.workers.limits import jobs

FILES = 8
TENSORS = 8  # in each file


def main() -> None:
    options = side_by_side.arguments(__doc__.splitlines()[0], size="2GB").parse_args()
    threads, nbytes = jobs(), size_in_bytes(options.size)
    with workplace(options.dir) as place:
        first = save(place / "first", nbytes, lambda tensor: tensor)
        equal = place / "equal"
        shutil.copytree(first, equal)
        pairs = [(path, equal / path.name) for path in sorted(first.glob("*.safetensors"))]
        warm(place)
        rows = compare(
            [
                Contestant("ftckpt, in a process", lambda: diff(first, equal, threads), ours=True),
                Contestant("ftckpt diff, the command", lambda: command(first, equal, nbytes)),
                Contestant(f"cmp, {threads} at a time", lambda: cmp(pairs, threads)),
                Contestant("cmp, one after the other", lambda: cmp(pairs, 1)),
            ],
            options.rounds,
        )
        extra: dict[str, object] = {
            "user and system CPU seconds, the command": used(lambda: command(first, equal, nbytes)),
            "user and system CPU seconds, cmp": used(lambda: cmp(pairs, 1)),
        }
        shutil.rmtree(equal)
        extra |= changed(place, nbytes, threads)
        side_by_side.show("diff of equal checkpoints, warm", rows, extra, as_json=options.json)


def save(path: Path, nbytes: int, change: Callable[..., Any], dtype: str = "float32") -> Path:
    """Write `nbytes` of normal random numbers, changed, as one checkpoint in safetensors."""
    import torch
    from safetensors.torch import save_file

    path.mkdir()
    placed: dict[str, str] = {}
    kind = getattr(torch, dtype)
    count = nbytes // FILES // TENSORS // kind.itemsize
    for file in range(FILES):
        tensors = {}
        for number in range(TENSORS):
            torch.manual_seed(file * TENSORS + number)
            name = f"layers.{file}.{number}.weight"
            tensors[name] = change(torch.randn(count)).to(kind)
            placed[name] = f"model-{file + 1:05d}-of-{FILES:05d}.safetensors"
        save_file(tensors, path / placed[name])
    index = {"metadata": {"total_size": nbytes}, "weight_map": placed}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def changed(place: Path, nbytes: int, threads: int) -> dict[str, object]:
    """Return our rates, in GB/s of one side, where there is arithmetic to do."""
    import torch

    def some(tensor: torch.Tensor) -> torch.Tensor:
        tensor[::1000] *= 1.01
        return tensor

    rates: dict[str, object] = {}
    for name, dtype, change in (
        ("float32, one in a thousand changed", "float32", some),
        ("float32, all changed", "float32", lambda t: t * 1.01),
        ("bfloat16, all changed", "bfloat16", lambda t: t * 1.01),
    ):
        first = save(place / "before", nbytes, lambda t: t, dtype)
        second = save(place / "after", nbytes, change, dtype)
        warm(place)
        began = time.perf_counter()
        diff(first, second, threads, equal=False)
        rates[f"{name}, GB/s"] = round(nbytes / (time.perf_counter() - began) / 1e9, 2)
        shutil.rmtree(first)
        shutil.rmtree(second)
    return rates


def diff(first: Path, second: Path, threads: int, *, equal: bool = True) -> int:
    contents = [
        Content.of(open_target(str(path), FORMATS, StoreOptions()).open())
        for path in (first, second)
    ]
    report: DiffReport = compare_checkpoints(
        contents[0], contents[1], Reading(), fields=state_fields,
        vocabulary=Vocabulary(), choice=Choice(), work=Work(threads=threads),
    )  # fmt: skip
    assert (not report.tensors) == equal
    return report.bytes_read // 2


def command(first: Path, second: Path, nbytes: int) -> int:
    words = [*ftckpt_command(), "diff", str(first), str(second)]
    done = subprocess.run(words, capture_output=True, cwd=side_by_side.ROOT, env=environment())
    assert done.returncode == 0, done.stderr
    return nbytes


def cmp(pairs: Sequence[tuple[Path, Path]], together: int) -> int:
    for start in range(0, len(pairs), together):
        running = [
            subprocess.Popen(["cmp", "-s", str(one), str(two)])
            for one, two in pairs[start : start + together]
        ]
        for process in running:
            assert process.wait() == 0
    return sum(one.stat().st_size for one, _ in pairs)


def used(run: Callable[[], object]) -> list[float]:
    """Return the CPU seconds that the processes which a call starts have used."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return [round(after.ru_utime - before.ru_utime, 3), round(after.ru_stime - before.ru_stime, 3)]


if __name__ == "__main__":
    main()
