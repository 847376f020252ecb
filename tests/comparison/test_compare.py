"""Two checkpoints compared, against their tensors compared as whole arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt.checkpoint import Box, Checkpoint, Decoding, Extent, Kind, Piece, TensorInfo
from ftckpt.checkpoint.dtypes import DTYPES, DType
from ftckpt.checkpoint.read_tensor import raw_dtype
from ftckpt.comparison import (
    Choice,
    DiffReport,
    DiffStatus,
    Field,
    Reading,
    TensorDifference,
    Tolerance,
    Vocabulary,
    compare,
)
from ftckpt.comparison import read as reading
from ftckpt.errors import ExitCode, FtckptError, NotFoundError
from ftckpt.findings import finding
from ftckpt.storage.memory import MemoryStore
from ftckpt.storage.source import Source
from ftckpt.transfer.content import Content
from ftckpt.workers import ALONE, Work
from tests.builders.raw_checkpoint import RawCheckpoint, placed
from tests.campaign import examples

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

EMBEDDING, OUTPUT = "embed.weight", "head.weight"
_numbers = count()
VOCABULARY = Vocabulary(lambda name: name in (EMBEDDING, OUTPUT))


def no_fields(_: Checkpoint) -> Iterator[Field | FtckptError]:
    return iter(())


def made(tensors: Mapping[str, Any], **aliases: str) -> RawCheckpoint:
    """Return a checkpoint of float arrays in one file; a key may begin with a kind."""
    import numpy as np

    store, infos = MemoryStore(f"memory://made-{next(_numbers)}"), {}
    data = bytearray()
    for key, values in tensors.items():
        array = np.asarray(values)
        dtype = next(d for d in DTYPES.values() if d.numpy and np.dtype(d.numpy) == array.dtype)
        kind, colon, name = key.rpartition(":")
        extent = Extent("f", len(data), array.nbytes)
        data += array.tobytes()
        pieces = [Piece(Box.whole(array.shape), extent)]
        component = "optimizer" if colon else "model"
        infos[key] = TensorInfo(component, name, Kind(kind or "param"), array.shape, dtype, pieces)
    store.put("f", bytes(data))
    source = Source.directory(store)
    return RawCheckpoint(source=source, tensors=infos, objects={}, aliases=aliases)


def diff(
    ours: Checkpoint,
    theirs: Checkpoint,
    vocabulary: Vocabulary = VOCABULARY,
    choice: Choice | None = None,
    work: Work = ALONE,
    **how: Any,
) -> DiffReport:
    return compare(
        Content.of(ours),
        Content.of(theirs),
        Reading(**how),
        fields=no_fields,
        vocabulary=vocabulary,
        choice=choice or Choice(),
        work=work,
    )


def only(report: DiffReport) -> TensorDifference:
    (tensor,) = report.tensors
    return tensor


@st.composite
def two_checkpoints(draw: st.DrawFn) -> Any:
    """Draw tensors, some of them changed, and two checkpoints that hold them in their own ways."""
    import numpy as np

    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    sides: tuple[dict[str, tuple[DType, Array]], ...] = ({}, {})
    for number in range(draw(st.integers(1, 4))):
        dtype = DTYPES[draw(st.sampled_from(["uint8", "bfloat16", "float32", "complex64"]))]
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        one = random.integers(0, 256, (*shape, dtype.itemsize), np.uint8)
        two = one.copy()
        if one.size and draw(st.booleans()):
            for _ in range(draw(st.integers(1, 3))):
                two.reshape(-1)[draw(st.integers(0, two.size - 1))] ^= 1
        for side, raw in zip(sides, (one, two), strict=True):
            items = np.frombuffer(raw.tobytes(), raw_dtype(dtype.itemsize)).reshape(shape)
            side[f"layers.{number}.w"] = dtype, items
    return sides, [placed(draw, side, f"side-{n}") for n, side in enumerate(sides)]


class _Helped(Decoding):
    """One tensor is decoded from the other."""

    def helpers(self) -> Mapping[str, Sequence[str]]:
        return {"one": ["other"]}


@settings(max_examples=examples(40, 320), deadline=None)
@given(
    two=two_checkpoints(),
    jobs=st.integers(1, 3),
    block=st.sampled_from([8, 24, 1 << 20]),
    helped=st.booleans(),
)
def test_however_both_are_divided(two: Any, jobs: int, block: int, helped: bool) -> None:
    import numpy as np

    (ours, theirs), checkpoints = two
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "size_for", lambda _: block)
        patch.setattr(reading, "_TASK", 3 * block)
        patch.setattr(reading, "_SIDE_BY_SIDE", block)
        if helped:
            patch.setattr(RawCheckpoint, "decoding", _Helped())
        report = diff(checkpoints[0], checkpoints[1], work=Work(threads=jobs))
    changed = {
        key: int(np.count_nonzero(items != theirs[key][1])) for key, (_, items) in ours.items()
    }
    assert {t.key: t.changed for t in report.tensors} == {k: n for k, n in changed.items() if n}
    assert report.total.tensors == len(ours)
    assert report.total.changed == sum(changed.values())
    assert report.total.elements == sum(items.size for _, items in ours.values())
    assert report.code is (ExitCode.DIFFERENT if any(changed.values()) else ExitCode.OK)
    for tensor in report.tensors:
        dtype, items = ours[tensor.key]
        if dtype.name in ("uint8", "float32"):
            with np.errstate(all="ignore"):  # a signalling NaN
                a, b = (
                    side[tensor.key][1].view(dtype.numpy).astype("g") for side in (ours, theirs)
                )
            keep = np.isfinite(a) & np.isfinite(b)
            a, b = a[keep], b[keep]
            assert tensor.max_abs == pytest.approx(float(np.abs(a - b).max(initial=0)))
            # The norm is of all that is finite, of blocks that are the same on both sides too.
            if (a**2).sum():
                wanted = float(np.sqrt(((a - b) ** 2).sum() / (a**2).sum()))
                assert tensor.relative_l2 == pytest.approx(wanted)
            assert tensor.nan_a == (
                0 if dtype.name == "uint8" else np.isnan(items.view("f4")).sum()
            )


def test_what_one_lacks_and_what_has_another_form() -> None:
    import numpy as np

    ones = np.ones(4, "f4")
    ours = made({"a": ones, "b": ones, "shape": ones, "type": ones})
    theirs = made({"b": ones, "c": ones, "shape": ones.reshape(2, 2), "type": ones.astype("f2")})
    report = diff(ours, theirs)
    found = {t.key: t.status for t in report.tensors}
    assert found == {
        "a": DiffStatus.MISSING, "c": DiffStatus.ADDED, "shape": DiffStatus.OTHER_SHAPE,
        "type": DiffStatus.OTHER_DTYPE,
    }  # fmt: skip
    assert report.evidence == {"headers": 4, "read": 1}
    assert report.bytes_read == 2 * ones.nbytes
    shape = next(t for t in report.tensors if t.key == "shape")
    assert (shape.shape_a, shape.shape_b, shape.changed) == ((4,), (2, 2), None)


def test_tolerances_make_close_what_is_close_and_compare_types_by_value() -> None:
    import numpy as np

    ours = made({"w": np.array([1, 2, 0], "f4"), "t": np.array([1, 2, 3], "f4")})
    theirs = made({"w": np.array([1, 2.01, 0], "f4"), "t": np.array([1, 2, 3], "f2")})
    strict = diff(ours, theirs)
    assert strict.total.counts == {"different": 1, "other dtype": 1}
    close = diff(ours, theirs, tolerance=Tolerance(0.01))
    assert close.total.counts == {"close": 2}
    assert close.code is ExitCode.OK
    assert {t.beyond for t in close.tensors} <= {0, None}
    beyond = diff(ours, theirs, tolerance=Tolerance(0.001))
    assert beyond.code is ExitCode.DIFFERENT
    assert {t.key: (t.status, t.beyond) for t in beyond.tensors}["w"] == (DiffStatus.DIFFERENT, 1)


def test_padding_rows_are_no_difference_where_the_true_rows_are_known() -> None:
    import numpy as np

    rows = np.arange(12, dtype="f4").reshape(6, 2)
    short, padded = rows[:5], np.vstack([rows[:5], np.full((3, 2), 9, "f4")])
    tensors = {EMBEDDING: short, f"exp_avg:{EMBEDDING}": short, "other.weight": short}
    ours = made(tensors)
    theirs = made(dict.fromkeys(tensors, padded))
    assert diff(ours, theirs).total.counts == {"other shape": 3}
    known = replace(VOCABULARY, true_rows=5)
    report = diff(ours, theirs, known)
    assert report.total.counts == {"equal": 2, "other shape": 1}
    assert only(report).key == "other.weight"
    assert report.true_vocab_rows == 5
    # Padding of one size on both sides is no difference either; a true row is.
    changed = padded.copy()
    changed[5:] += 1
    assert (
        diff(theirs, made({**dict.fromkeys(tensors, changed), "other.weight": padded}), known).code
        == 0
    )
    changed[4] += 1
    report = diff(theirs, made({EMBEDDING: changed}), known, Choice(tensors=[EMBEDDING]))
    assert (only(report).changed, only(report).rows, only(report).elements) == (2, 5, 10)
    assert diff(ours, theirs, replace(VOCABULARY, true_rows=6)).code is ExitCode.DIFFERENT


def test_tied_copies_are_no_difference() -> None:
    import numpy as np

    rows = np.arange(6, dtype="f4").reshape(3, 2)
    alone = made({EMBEDDING: rows})
    alias = made({EMBEDDING: rows}, **{OUTPUT: EMBEDDING})
    twice = made({EMBEDDING: rows, OUTPUT: rows})
    for ours in (alone, alias, twice):
        for theirs in (alone, alias, twice):
            report = diff(ours, theirs)
            assert report.code is ExitCode.OK, (ours.aliases, theirs.tensors, report.tensors)
    untied = made({EMBEDDING: rows, OUTPUT: rows + 1})
    assert only(diff(alone, untied)).status is DiffStatus.ADDED
    assert only(diff(untied, alone)).status is DiffStatus.MISSING
    assert only(diff(alias, untied)).status is DiffStatus.DIFFERENT
    # Equal bits alone tie nothing that is no vocabulary.
    assert only(diff(made({"a": rows}), made({"a": rows, "b": rows}))).status is DiffStatus.ADDED


def test_a_hole_and_a_missing_file_are_found_and_the_rest_is_compared() -> None:
    import numpy as np

    rows = np.arange(6, dtype="f4").reshape(3, 2)
    whole = made({"a": rows, "b": rows, "c": rows})
    torn = made({"a": rows, "b": rows, "c": rows + 1})
    infos = dict(torn.tensors)
    infos["a"] = infos["a"]._replace(pieces=[Piece(Box((0, 0), (2, 2)), Extent("f", 0, 16))])
    infos["b"] = infos["b"]._replace(pieces=[Piece(Box((0, 0), (3, 2)), Extent("g", 0, 24))])
    report = diff(whole, replace(torn, tensors=infos))
    assert {t.key: t.status for t in report.tensors} == {
        "a": DiffStatus.UNREAD, "b": DiffStatus.UNREAD, "c": DiffStatus.DIFFERENT,
    }  # fmt: skip
    assert {(f.kind, f.tensor) for f in report.findings} == {("hole", "a"), ("missing-file", "b")}
    assert report.code is ExitCode.CORRUPT


def test_summaries_are_by_component_and_layer() -> None:
    import numpy as np

    ones = np.ones(4, "f4")
    names = [
        "layers.10.a.w",
        "layers.10.b.w",
        "layers.9.a.w",
        "head.weight",
        "exp_avg:layers.9.a.w",
    ]
    ours = made(dict.fromkeys(names, ones) | {"count": np.array([7])})
    theirs = made({name: ones * (2 if "layers.10" in name else 1) for name in names}
                  | {"count": np.array([9])})  # fmt: skip
    report = diff(ours, theirs)
    assert [one.name for one in report.layers] == ["count", "head", "layers.9", "layers.10"]
    assert {one.name: one.relative_l2 for one in report.layers} == {
        "count": None, "head": 0, "layers.9": 0, "layers.10": 1,
    }  # fmt: skip
    assert {one.name: one.max_abs for one in report.layers} == {
        "count": 2, "head": 0, "layers.9": 0, "layers.10": 1,
    }  # fmt: skip
    assert {one.name: one.max_abs for one in report.components} == {"model": 2, "exp_avg": 0}
    assert {cell.layer: cell.relative_l2 for cell in report.cells}["count"] is None
    assert {one.name: (one.tensors, one.changed) for one in report.components} == {
        "model": (5, 9), "exp_avg": (1, 0),
    }  # fmt: skip
    assert [t.key for t in report.tensors] == ["layers.10.a.w", "layers.10.b.w", "count"]
    assert report.tensors[-1].max_abs == 2


def test_a_part_is_chosen_by_component_and_by_name() -> None:
    import numpy as np

    one = made({"a.w": np.ones(2, "f4"), "exp_avg:a.w": np.ones(2, "f4")})
    two = made({"a.w": np.zeros(2, "f4"), "exp_avg:a.w": np.ones(2, "f4")})
    assert diff(one, two, choice=Choice(components=["exp_avg"])).code is ExitCode.OK
    assert diff(one, two, choice=Choice(components=["optimizer"])).total.tensors == 1
    assert diff(one, two, choice=Choice(tensors=["*a.w"])).total.tensors == 2
    for part in ("model", "state"):  # each matches something, and nothing is both
        with pytest.raises(NotFoundError, match=rf"exp_avg:\* in {part}"):
            diff(one, two, choice=Choice(components=[part], tensors=["exp_avg:*"]))
    with pytest.raises(NotFoundError) as caught:
        diff(one, two, choice=Choice(tensors=["exp_avg:a.v"]))
    assert "exp_avg:a.w" in caught.value.hint
    assert diff(one, two, choice=Choice(tensors=["a.*"])).code is ExitCode.DIFFERENT
    assert diff(one, two, choice=Choice(["model"], ["*a.w"])).total.tensors == 1
    for choice in (Choice(components=["ema"]), Choice(tensors=["b*"])):
        with pytest.raises(NotFoundError):
            diff(one, two, choice=choice)


def test_counters_are_fields_and_what_only_looks_like_one_is_a_tensor() -> None:
    import numpy as np

    def state(step: Any, shape: tuple[int, ...], rng: int) -> RawCheckpoint:
        whole = made({"other:w.step": np.array(step, "f4"), "other:count": np.zeros(shape, "f4"),
                      "rng": np.zeros(rng, "u1")})  # fmt: skip
        infos = {info.key: info for info in (
            whole.tensors["other:w.step"], whole.tensors["other:count"],
            whole.tensors["rng"]._replace(
                component="extra:rng", name="torch_rng_state", kind=Kind.OTHER),
        )}  # fmt: skip
        return replace(whole, tensors=infos)

    report = diff(state(3, (1,), 5056), state(4, (1,), 5056))
    assert report.total.tensors == 0
    assert [(d.name, d.about, d.a, d.b) for d in report.state] == [
        ("optimizer:w.step", "step", "3.0", "4.0")
    ]
    # A counter of another size on the other side is neither missing nor added.
    report = diff(state(3, (1,), 2 << 20), state(3, (2,), 2 << 20))
    assert report.state == []
    assert {t.key: t.status for t in report.tensors} == {"optimizer:count": DiffStatus.OTHER_SHAPE}
    assert report.total.counts["equal"] == 1  # a generator's state of megabytes is none


def test_a_counter_that_cannot_be_read_is_a_finding_of_its_own() -> None:
    import numpy as np

    def state(size: int) -> RawCheckpoint:
        whole = made({"other:w.step": np.array(3, "f4"), "w": np.ones(2, "f4")})
        info = whole.tensors["other:w.step"]
        piece = info.pieces[0]
        torn = piece._replace(extent=piece.extent._replace(length=size))
        infos = {i.key: i for i in (info._replace(pieces=[torn]), whole.tensors["w"])}
        return replace(whole, tensors=infos)

    report = diff(state(4), state(2))
    assert [(f.kind, f.tensor) for f in report.findings] == [("size-mismatch", "optimizer:w.step")]
    assert (report.state, report.code) == ([], ExitCode.CORRUPT)
    assert report.total.counts == {"equal": 1}


def test_state_that_one_side_lacks_is_not_equal_where_a_file_of_it_cannot_be_read() -> None:
    whole = made({"w": [1.0]})
    wrong = finding("truncated-file", "rng.pt is cut", file="rng.pt")
    cut = replace(made({"w": [1.0]}), open_findings=[wrong])

    def fields(checkpoint: Checkpoint) -> Iterator[Field]:
        if checkpoint is whole:
            yield Field("rng", None, "5", b"5")

    for ours, theirs in ((whole, cut), (cut, whole)):
        sides = Content.of(ours), Content.of(theirs)
        report = compare(*sides, Reading(), fields=fields, vocabulary=VOCABULARY)
        assert [f.kind for f in report.findings] == ["truncated-file"]
        assert (report.state, report.code) == ([], ExitCode.CORRUPT)
    assert diff(whole, cut, choice=Choice(tensors=["w"])).code is ExitCode.OK


def test_two_copies_of_one_damage_are_not_equal() -> None:
    def damaged(file: str) -> RawCheckpoint:
        return replace(
            made({"w": [1.0]}), open_findings=[finding("truncated-file", "is cut", file=file)]
        )

    report = diff(damaged("g"), damaged("g"))
    assert ([f.kind for f in report.findings], report.code) == (
        ["truncated-file"] * 2,
        ExitCode.CORRUPT,
    )
    assert diff(damaged("f"), damaged("f")).code is ExitCode.OK  # what it holds was compared
