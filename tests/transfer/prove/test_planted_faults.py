"""Faults planted in the planner, the gatherer, the engine and the writer: the proof finds each.

A fault strikes once, at a call that is drawn, and either the transfer fails and shows nothing, or
the result is what it should be (the fault touched nothing that is written). `--campaign full` draws
many.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import ftckpt.transfer.read.copies_plan as planning
import ftckpt.transfer.read.elements as gathering
import ftckpt.transfer.write.blocks as making
from ftckpt import open_checkpoint
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.errors import FtckptError
from ftckpt.operations.transferring import convert, reshard
from ftckpt.storage.local import write_in_place as writing
from ftckpt.transfer.layout import Elements, Layout, OutputFile, Segment
from ftckpt.transfer.read.copies_plan import ElementMove
from ftckpt.transfer.run import TransferReport
from tests.builders.megatron_files import write
from tests.builders.megatron_model import Job
from tests.campaign import examples

pytestmark = pytest.mark.slow

# What is done to one value that a function returns or is given; None where nothing can be done.
Spoil = Callable[[random.Random, Any], Any]


@dataclass(frozen=True)
class Point:
    """A place in the code where a fault is planted.

    Attributes:
        owner: module or class.
        name: of the function or method.
        spoil: what becomes of its result; or, with `given`, of that argument.
        given: number of the argument that is spoiled after (`out`) or before the call.
        after: whether the argument is a buffer that the call has filled.
    """

    owner: Any
    name: str
    spoil: Spoil
    given: int | None = None
    after: bool = True


def _moved(draw: random.Random, move: ElementMove | None) -> ElementMove | None:
    """Return a move that reads or places its elements elsewhere."""
    if move is None:
        return None
    item = move.dtype.itemsize
    kind = draw.choice(["offset", "place", "strides", "steps", "gone"])
    if kind == "offset":
        return move._replace(offset=move.offset + draw.choice([-item, item]))
    if kind == "place" and move.start:
        return move._replace(start=move.start - 1, stop=move.stop - 1)
    if kind == "strides" and len(move.sizes) > 1:
        return move._replace(strides=move.strides[::-1])
    if kind == "steps" and len(move.sizes) > 1:
        return move._replace(steps=move.steps[::-1])
    return None if kind == "gone" else move


def _spoiled(draw: random.Random, view: memoryview) -> None:
    """Change bytes that were put in order: shift, swap, forget or flip some."""
    count = len(view)
    kind = draw.choice(["shift", "halves", "zero", "bit", "sign", "repeat", "reverse"])
    data = bytes(view)
    half = count // 2
    if kind == "shift":
        view[:] = data[-4:] + data[:-4] if count > 4 else data[::-1]
    elif kind == "halves":
        view[: count - half], view[count - half :] = data[half:], data[:half]
    elif kind == "zero":
        view[half:] = bytes(count - half)
    elif kind == "bit":
        at = draw.randrange(count)
        view[at] ^= 1 << draw.randrange(8)
    elif kind == "sign":  # of two elements: changes that cancel in a plain sum
        for at in {3, count // 4 * 4 - 1} if count >= 8 else {count - 1}:
            view[at] ^= 0x80
    elif kind == "repeat":
        view[half : 2 * half] = data[:half]
    else:
        view[:] = data[::-1]


def _other_place(draw: random.Random, offset: int) -> int:
    return max(0, offset + draw.choice([-64, -4, -1, 1, 4, 64]))


def _flipped(draw: random.Random, view: memoryview) -> memoryview:
    data = bytearray(view)
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return memoryview(data)


def _forgotten(draw: random.Random, view: memoryview) -> memoryview:
    return memoryview(bytes(len(view)))


POINTS = {
    "a move is planned elsewhere": Point(gathering, "meeting", _moved),
    "a part of a move is cut elsewhere": Point(
        planning.ElementMove, "within", lambda draw, moves: moves[::-1][: draw.randrange(2)]
    ),
    "a reading is left out": Point(gathering, "readings", lambda draw, all_: list(all_)[1:]),
    "elements are put in another order": Point(gathering.Gatherer, "fill", _spoiled, given=4),
    "strided elements are put in another order": Point(
        gathering.Gatherer, "place", _spoiled, given=4
    ),
    "a cast gives other numbers": Point(gathering, "cast", lambda draw, items: items[::-1].copy()),
    "the engine spoils a segment": Point(making.BlockMaker, "_fill", _spoiled, given=3),
    "the writer writes elsewhere": Point(
        writing.LocalUpload, "write", _other_place, given=1, after=False
    ),
    "the writer flips a bit": Point(writing.LocalUpload, "write", _flipped, given=2, after=False),
    "the writer forgets": Point(writing.LocalUpload, "write", _forgotten, given=2, after=False),
}


@contextmanager
def planted(point: Point, draw: random.Random, when: int) -> Iterator[list[int]]:
    """Let one call go wrong: number `when`; -1 for none. Yield a list that counts the calls."""
    real = getattr(point.owner, point.name)
    calls = [0]

    def wrong(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] - 1 != when:
            return real(*args, **kwargs)
        if point.given is None:
            return point.spoil(draw, real(*args, **kwargs))
        if point.after:
            result = real(*args, **kwargs)
            if len(args[point.given]):
                point.spoil(draw, args[point.given])
            return result
        given = list(args)
        given[point.given] = point.spoil(draw, given[point.given])
        return real(*given, **kwargs)

    setattr(point.owner, point.name, wrong)
    try:
        yield calls
    finally:
        setattr(point.owner, point.name, real)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("source"), Job(tp=2, optimizer="masters")).path


TRANSFERS: dict[str, Callable[[str, str], TransferReport]] = {
    "TP 2 to 4": lambda one, two: reshard(one, two, tp=4, jobs=2),
    "TP 2 to 1": lambda one, two: reshard(one, two, tp=1, jobs=2),
    "to safetensors": lambda one, two: convert(one, two, "safetensors", jobs=2),
    "to DCP": lambda one, two: convert(one, two, "dcp", jobs=2),
    "to bf16": lambda one, two: convert(
        one, two, "safetensors", only="model", from_master=True, dtype="bf16", jobs=2
    ),
}


def _content(path: str) -> dict[str, bytes]:
    checkpoint = open_checkpoint(path)
    return {key: bytes(read_tensor(checkpoint, key)) for key in checkpoint.tensors}


@pytest.mark.parametrize("name", TRANSFERS)
def test_every_planted_fault_is_found(name: str, source: Path, tmp_path: Path) -> None:
    move = TRANSFERS[name]
    draw = random.Random(f"faults of {name}")
    struck = 0
    calls = {}
    for what, point in POINTS.items():
        out = str(tmp_path / f"good {what}")
        with planted(point, draw, -1) as counted:
            report = move(str(source), out)
        assert report.proof is not None
        calls[what] = counted[0]
    good = _content(out)
    for number in range(examples(12, 300)):
        what = draw.choice([one for one in POINTS if calls[one]])
        when = draw.randrange(calls[what])
        out = str(tmp_path / f"out{number}")
        with planted(POINTS[what], draw, when):
            try:
                move(str(source), out)
            except (FtckptError, ValueError, IndexError, TypeError):
                struck += 1
                assert not Path(out).exists(), (what, when)
                continue
        assert _content(out) == good, (what, when)
    assert struck > examples(2, 80)


def _swapped(draw: random.Random, layout: Layout) -> Layout | None:
    """Return a layout with two runs of elements in each other's places, or one run twice."""
    places = [
        (number, at)
        for number, file in enumerate(layout.files)
        for at, segment in enumerate(file.segments)
        if isinstance(segment, Elements) and segment.nbytes
    ]
    draw.shuffle(places)
    for one in places:
        for two in places:
            first, second = (layout.files[f].segments[s] for f, s in (one, two))
            if one == two or first.nbytes != second.nbytes or first == second:
                continue
            swapped: dict[tuple[int, int], Segment] = {one: second}
            if draw.random() < 0.5:
                swapped[two] = first
            files = [
                OutputFile(
                    file.path, [swapped.get((n, s), old) for s, old in enumerate(file.segments)]
                )
                for n, file in enumerate(layout.files)
            ]
            return replace(layout, files=files)
    return None


@pytest.mark.parametrize("name", TRANSFERS)
def test_a_layout_that_mixes_tensors_up_is_found(
    name: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ftckpt.operations.writing as api

    draw = random.Random(f"layouts of {name}")
    good: dict[str, bytes] = {}
    real, found = api.__dict__["lay_out"], 0

    def lay_out(*args: Any, **kwargs: Any) -> Layout:
        return _swapped(draw, real(*args, **kwargs)) or real(*args, **kwargs)

    for number in range(examples(5, 100)):
        out = str(tmp_path / f"out{number}")
        if not good:
            TRANSFERS[name](str(source), str(tmp_path / "good"))
            good = _content(str(tmp_path / "good"))
            monkeypatch.setattr(api, "lay_out", lay_out)
        try:
            TRANSFERS[name](str(source), out)
        except FtckptError:
            found += 1
            assert not Path(out).exists()
            continue
        assert _content(out) == good
    assert found > examples(2, 40)
