"""Deltas of a real training state, side by side with zstd, XOR and byte planes, and ZipNN.

    python benchmarks/delta.py [--cache DIR] [--width 256] [--layers 6] [--steps 100] [--rounds 3]
                               [--zipnn PYTHON] [--json]

A small GPT is trained first (delta_data.py), a quarter of an hour on two cores; `--cache DIR` keeps
its states and takes them from there the next time. `--zipnn PYTHON` names an interpreter that has
zipnn 0.5. Speeds are bytes of the state a second of processor time, on one thread, each piece in
the best of its rounds, because others work on most machines; of two threads how much faster they
were by the clock, and of two processes, which share the memory and no interpreter's lock: what the
machine allows. The elements are in memory, the blocks' digests count, and the choice by a sample is
told apart. Every decoding is compared with the original. Below them stands what byte planes allow
(delta_bound.py).
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import multiprocessing.process
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from delta_bound import bound
from delta_peers import Best, Peer, Result, patch_from, xor_planes, zipnn, zstd
from delta_states import (
    DISTANCES,
    State,
    arguments,
    copy,
    load,
    make,
    step_that_leaves,
    unchanged,
    weights,
    without_weights,
)
from side_by_side import machine, workplace

from ftckpt.checkpoint import Topology
from ftckpt.delta import (
    EFFORTS,
    BaseName,
    DataFile,
    DeltaDecoder,
    DeltaEncoder,
    DeltaIndex,
    Rows,
    pair,
)
from ftckpt.delta.index.parse import parse_index
from ftckpt.delta.pack.build import divide

# The state is small, and the system may leave two new threads on one processor for 0.1 s.
PASSES = 10
NO_DIGEST = "0" * 32  # what a tensor's digest costs is measured elsewhere


class Delta:
    """One pair of states, planned once, encoded and decoded as often as asked."""

    def __init__(self, target: State, base: State | None, effort: int) -> None:
        pairs = pair(target.infos.values(), {} if base is None else base.infos)
        settings = target.settings
        if base is not None:
            apart = (settings.step or 0) - (base.settings.step or 0)
            settings = settings._replace(distance=apart)
        self.target, self.base = target, base
        fill = None if base is None else base.fill
        self.encoder = DeltaEncoder(pairs, target.fill, fill, lambda _: settings, EFFORTS[effort])
        begin = time.thread_time()
        self.plans = [self.encoder.plan(number) for number in range(len(pairs))]
        self.planning = time.thread_time() - begin
        # As `pack` goes through them: what predicts a parameter's tensors is read once.
        self.tasks = [block for part in divide(pairs) for block in part.blocks]

        self.rows = Rows([self.encoder.blocks(number) for number in range(len(pairs))])
        # Room for two at a time; made before, because the memory of a file is not the subject.
        self.room = shared(2 * target.nbytes)

    def encode(self, tasks: Iterable[tuple[int, int]], at: int = 0) -> int:
        """Encode blocks and write them from a place of the file on; return where they end."""
        for number, block in tasks:
            made = self.encoder.encode(number, block, self.plans[number])
            self.rows.put(number, block, made.at(0, at))
            end = at + len(made.payload)
            copy(made.payload, self.room[at:end])
            at = end
        return at

    def count(self) -> dict[str, int]:
        """Return the bytes stored, by class."""
        sizes: dict[str, int] = {}
        index = self.index()
        for tensor in index.tensors:
            stored = sum(block.length for block in index.blocks_of(tensor))
            sizes[tensor.kind.value] = sizes.get(tensor.kind.value, 0) + stored
        return sizes

    def index(self) -> DeltaIndex:
        count = len(self.encoder.pairs)
        return DeltaIndex(
            step=None,
            source_format="",
            topology=Topology(),
            base=None if self.base is None else BaseName("", None, NO_DIGEST),
            files=[DataFile("0", len(self.room))],
            tensors=[
                self.encoder.tensor(n, self.plans[n], self.rows.first[n], NO_DIGEST, NO_DIGEST)
                for n in range(count)
            ],
            objects=[],
            aliases={},
            rows=self.rows.dump(),
        )

    def decoder(self) -> DeltaDecoder:
        return DeltaDecoder(
            parse_index(self.index().dump()),
            lambda _, offset, length: self.room[offset : offset + length],
            None if self.base is None else self.base.fill,
        )


def ours(effort: int, rounds: int) -> Callable[[State, State | None], tuple[Result, float]]:
    """Return our own contestant; it also says what choosing took."""

    def run(target: State, base: State | None) -> tuple[Result, float]:
        delta = Delta(target, base, effort)
        out = {key: memoryview(bytearray(len(data))) for key, data in target.data.items()}
        encoding, decoding = Best(), Best()
        for _ in range(rounds):
            at = 0
            for task in delta.tasks:
                with encoding.timed(task):
                    at = delta.encode([task], at)
            decoder = delta.decoder()
            # A parameter's tensors together, in the order in which they predict each other.
            for key in by_parameter(target):
                with decoding.timed(key):
                    decoder.fill(key, 0, out[key])
        assert all(out[key] == data for key, data in target.data.items())
        return Result(delta.count(), encoding.sum, decoding.sum), delta.planning

    return run


def by_parameter(state: State) -> list[str]:
    order = ["exp_avg", "exp_avg_sq", "master", "param"]
    infos = state.infos
    return sorted(infos, key=lambda key: (infos[key].name, order.index(infos[key].kind.value)))


class Scaling(NamedTuple):
    """How many times as fast two workers are as one, by the clock."""

    encode: float
    decode: float


def scaling(target: State, base: State | None, rounds: int) -> dict[str, Scaling]:
    """Return how two threads scale, and two processes."""
    delta = Delta(target, base, 1)
    delta.encode(delta.tasks)
    decoder = delta.decoder()
    out = [{key: shared(len(data)) for key, data in target.data.items()} for _ in range(2)]
    keys = by_parameter(target)
    kinds = len({info.kind for info in target.infos.values()})
    parameters = [keys[start : start + kinds] for start in range(0, len(keys), kinds)]

    def decode(parts: Iterable[list[str]], number: int) -> None:
        for key in chain.from_iterable(parts):
            decoder.fill(key, 0, out[number][key])

    def encode(passes: Iterable[Iterable[tuple[int, int]]], at: int) -> None:
        for tasks in passes:
            delta.encode(tasks, at)

    times: dict[tuple[str, int], Scaling] = {}
    for _ in range(rounds):
        for workers, together in (("threads", threads), ("processes", processes)):
            for many in (2, 1):
                shares = PASSES // many
                if together is threads:
                    # They take the next piece from one iterator, as those of a real run do.
                    passes = [iter(delta.tasks) for _ in range(PASSES)]
                    parts = [iter(parameters * PASSES)] * many
                    encoders = [partial(encode, passes, n * target.nbytes) for n in range(many)]
                else:
                    parts = [iter(parameters * shares) for _ in range(many)]
                    whole = [delta.tasks] * shares
                    encoders = [partial(encode, whole, n * target.nbytes) for n in range(many)]
                encoding = together(encoders)
                delta.encode(delta.tasks)
                decoding = together([partial(decode, part, n) for n, part in enumerate(parts)])
                best = times.get((workers, many), Scaling(inf, inf))
                times[workers, many] = Scaling(*map(min, best, (encoding, decoding)))
    found = {}
    for workers in ("threads", "processes"):
        one, two = times[workers, 1], times[workers, 2]
        found[workers] = Scaling(one.encode / two.encode, one.decode / two.decode)
    return found


def threads(work: Sequence[partial[Any]]) -> float:
    """Return the seconds that as many threads take."""
    return _together([threading.Thread(target=each) for each in work])


def processes(work: Sequence[partial[Any]]) -> float:
    """Return the seconds that as many processes take, copies of this one."""
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=each) for each in work]
    taken = _together(workers)
    assert not any(worker.exitcode for worker in workers)
    return taken


def _together(workers: Sequence[threading.Thread | multiprocessing.process.BaseProcess]) -> float:
    begin = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - begin


def shared(nbytes: int) -> memoryview:
    """Return memory that copies of this process share, touched."""
    room = memoryview(mmap.mmap(-1, max(1, nbytes)))[:nbytes]
    for start in range(0, nbytes, mmap.PAGESIZE):
        room[start] = 1
    return room


def pairs_of_states(place: Path) -> Iterator[tuple[str, State, State | None]]:
    """Yield states alone, and with their base: named by regime and distance in steps."""
    yield "alone", load(place / "high-1.safetensors"), None
    yield "alone, no bf16", without_weights(load(place / "high-1.safetensors")), None
    for regime, distances in DISTANCES.items():
        for distance in distances:
            path = place / f"{regime}-{distance}.safetensors"
            target, base = load(path), load(place / f"{regime}-0.safetensors")
            yield f"{regime}, {distance}", target, base
            if regime == "tune" and distance == 1:
                for same in (0.93, 0.99):
                    part = step_that_leaves(same, target, base)
                    yield f"bf16, {unchanged(part, base):.1%} same", part, weights(base)


def compare(options: argparse.Namespace, place: Path) -> Iterator[dict[str, Any]]:
    peers: dict[str, Peer] = {
        "zstd -3": zstd,
        "zstd --patch-from": patch_from,
        "xor + planes + zstd -1": xor_planes,
    }
    if options.zipnn:
        peers["ZipNN"] = zipnn(options.zipnn)
    for name, target, base in pairs_of_states(place):
        for effort in (2, 1):
            result, planning = ours(effort, options.rounds)(target, base)
            more = {"planning": planning}
            if effort == 1:
                for workers, times in scaling(target, base, options.rounds).items():
                    more |= {f"two {workers} {way}": x for way, x in times._asdict().items()}
            yield row(name, f"ftckpt, level {effort}", target, result, **more)
        for peer, run in peers.items():
            made = run(target, base, options.rounds)
            if made is not None:
                yield row(name, peer, target, made)
        yield row(name, "(what planes allow)", target, Result(bound(target, base), inf, inf))


def row(state: str, who: str, target: State, result: Result, **more: float) -> dict[str, Any]:
    whole: dict[str, int] = {}
    for info in target.infos.values():
        whole[info.kind.value] = whole.get(info.kind.value, 0) + info.nbytes
    ratios = {
        kind: round(whole[kind] / size, 3) if size else None  # nothing stored: it is derived
        for kind, size in result.sizes.items()
        if kind
    }
    return {
        "state": state,
        "who": who,
        "ratio": round(target.nbytes / sum(result.sizes.values()), 3),
        "classes": ratios,
        "encode": round(target.nbytes / result.encode / 1e9, 2),
        "decode": round(target.nbytes / result.decode / 1e9, 2),
        **{key: round(value, 3) for key, value in more.items()},
    }


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--zipnn", help="a Python interpreter that has zipnn")
    options = parser.parse_args()
    with workplace(None) if options.cache is None else nullcontext(options.cache) as place:
        make(place, options.width, options.layers, options.steps)
        rows = []
        if not options.json:
            print(f"deltas of a training state  ({machine()})")
            print(f"{'state':18}{'':24}{'ratio':>8}{'encode':>8}{'decode':>8}  GB/s; by class")
        for made in compare(options, place):
            rows.append(made)
            if not options.json:
                show(made)
    if options.json:
        json.dump({"machine": machine(), "zipnn": bool(options.zipnn), "rows": rows}, sys.stdout)
    elif not options.zipnn:
        print("ZipNN: not installed; --zipnn PYTHON names an interpreter that has it")


def show(made: dict[str, Any]) -> None:
    classes = ", ".join(f"{kind} {ratio or 'derived'}" for kind, ratio in made["classes"].items())
    speeds = "".join(f"{made[way] or '':>8}" for way in ("encode", "decode"))
    print(f"{made['state']:18}{made['who']:24}{made['ratio']:8.3f}{speeds}  {classes}")
    for workers in ("threads", "processes"):
        ways = [made.get(f"two {workers} {way}") for way in Scaling._fields]
        if all(ways):
            print(f"{'':18}  two {workers}: " + ", ".join(f"{each:.2f} x" for each in ways))


if __name__ == "__main__":
    main()
