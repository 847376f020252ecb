"""The states that delta_data.py makes, in memory, without torch."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ftckpt.checkpoint import Kind, TensorInfo
from ftckpt.checkpoint.dtypes import BY_SAFETENSORS
from ftckpt.delta import FitSettings

# Regime -> how many steps after its base it is saved.
DISTANCES = {"high": (1, 10, 100), "late": (1, 10), "tune": (1, 10)}


@dataclass(frozen=True)
class State:
    """One state.

    Attributes:
        infos: its tensors by key.
        data: their bytes by key.
        settings: of its optimizer; the distance is not known.
    """

    infos: dict[str, TensorInfo]
    data: dict[str, memoryview]
    settings: FitSettings

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.data.values()))

    def fill(self, key: str, offset: int, view: memoryview) -> None:
        copy(self.data[key][offset : offset + len(view)], view)


def copy(source: bytes | memoryview, view: memoryview) -> None:
    """Copy bytes while other threads go on, as they do while a file is read or written."""
    import numpy as np

    np.copyto(np.frombuffer(view, "u1"), np.frombuffer(source, "u1"))


def load(path: Path) -> State:
    """Read one state; a tensor is called `<kind>.<name>` in the file."""
    whole = memoryview(path.read_bytes())
    start = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(bytes(whole[8:start]))
    said = {key: float(value) for key, value in header.pop("__metadata__").items()}
    infos, data = {}, {}
    for stored, row in header.items():
        kind, _, name = stored.partition(".")
        component = "model" if kind == "param" else "optimizer"
        dtype = BY_SAFETENSORS[row["dtype"]]
        info = TensorInfo(component, name, Kind(kind), tuple(row["shape"]), dtype, ())
        begin, end = row["data_offsets"]
        infos[info.key] = info
        data[info.key] = whole[start + begin : start + end]
    settings = FitSettings(
        said["beta1"], said["beta2"], said["eps"], said["lr"], said["weight_decay"],
        int(said["step"]),
    )  # fmt: skip
    return State(infos, data, settings)


def weights(state: State) -> State:
    """Return the bf16 weights alone, as they are sent to those who only use them."""
    infos = {key: info for key, info in state.infos.items() if info.kind is Kind.PARAM}
    return State(infos, {key: state.data[key] for key in infos}, state.settings)


def without_weights(state: State) -> State:
    """Return the fp32 tensors alone, as a run keeps them that has no bf16 copies."""
    infos = {key: info for key, info in state.infos.items() if info.kind is not Kind.PARAM}
    return State(infos, {key: state.data[key] for key in infos}, state.settings)


def unchanged(target: State, base: State) -> float:
    """Return the share of bf16 elements whose bits are equal."""
    import numpy as np

    same = 0
    for key in target.infos:
        now, before = (np.frombuffer(state.data[key], "<u2") for state in (target, base))
        same += int(np.count_nonzero(now == before))
    return same / (target.nbytes // 2)


def part_of_step(target: State, base: State, share: float) -> State:
    """Return the target's bf16 weights as a learning rate of `share` times its own makes them."""
    import numpy as np

    data = {}
    for info in weights(target).infos.values():
        master = info._replace(component="optimizer", kind=Kind.MASTER).key
        now, before = (np.frombuffer(state.data[master], "<f4") for state in (target, base))
        moved = (before + np.float32(share) * (now - before)).view("<u4")
        rounded = (moved + np.uint32(0x7FFF) + ((moved >> 16) & 1)) >> 16
        data[info.key] = memoryview(rounded.astype("<u2").tobytes())
    return State(weights(target).infos, data, target.settings)


def step_that_leaves(same: float, target: State, base: State) -> State:
    """Return the target's bf16 weights at the learning rate that leaves a share of them unchanged.

    States at the same share compare, whatever the training; what remains is how the changes lie.
    """
    low, high = 0.0, 4.0
    for _ in range(9):
        share = (low + high) / 2
        part = part_of_step(target, base, share)
        low, high = (low, share) if unchanged(part, base) < same else (share, high)
    return part


def arguments(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that say which states are trained, and how often."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--cache", type=Path, help="directory that keeps the trained states")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=100, help="before the first regime is saved")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def make(place: Path, width: int, layers: int, steps: int) -> None:
    """Train in a process of its own, unless the states are there already."""
    if (place / "tune-10.safetensors").exists():
        return
    place.mkdir(parents=True, exist_ok=True)
    script = Path(__file__).with_name("delta_data.py")
    sizes = ("--width", str(width), "--layers", str(layers), "--steps", str(steps))
    subprocess.run([sys.executable, script, place, *sizes], check=True, stdout=sys.stderr)
