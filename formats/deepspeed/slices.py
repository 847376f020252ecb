"""Read how DeepSpeed cuts parameters over tensor-parallel ranks from the checkpoint itself.

`universal_checkpoint_info` lists patterns of names by what happens to them; a parameter that none
matches is cut along axis 0 (that is the file's own rule, not a guess). Without it the names of
Megatron-DeepSpeed are known by a table, and other names need the user's.

Source: `deepspeed/checkpoint/ds_to_universal.py` (`merge_tp_slices`), `universal_checkpoint.py` and
`constants.py` of DeepSpeed 0.19.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from ftckpt.checkpoint import Box
from ftckpt.checkpoint.sharding import Rules, Slab, Split
from ftckpt.errors import CorruptError, UnsupportedError
from ftckpt.formats.deepspeed.zero.partition import Shape
from ftckpt.formats.pickles.inert import Inert
from ftckpt.formats.state.rule_tables import built_in

from .affine_maps import VERSION, AffineMap, read_map
from .states import ModelState

MAX_PATTERN = 512


class SliceCut(NamedTuple):
    """How one parameter is cut.

    Attributes:
        axis: along which; None where every rank holds all of it.
        widths: for each sub-block that the axis packs, the rows that each rank has of it; () for
            one block, of which each rank has what its shape says.
        averaged: whether the ranks' copies may differ, and DeepSpeed would average them.
        blocks: number of equal sub-blocks, as relative sizes, where `widths` is not recorded.
        mapped: the parts of all ranks, where an affine map records them.
    """

    axis: int | None = None
    widths: tuple[tuple[int, ...], ...] = ()
    averaged: bool = False
    blocks: tuple[int, ...] = ()
    mapped: AffineMap | None = None


WHOLE = SliceCut()


def place(
    name: str, cut: SliceCut, shapes: Sequence[Shape]
) -> tuple[Shape, list[tuple[Slab, ...]]]:
    """Return a parameter's global shape, and what each tensor-parallel rank holds of it.

    Ranks may hold parts of different sizes (AutoTP gives the first ones a row more).

    Args:
        name: of the parameter, for messages.
        cut: how it is cut.
        shapes: of each rank's part.

    Raises:
        CorruptError: the parts cannot be put together (`shape-mismatch`).
    """
    if cut.mapped is not None:
        parts = cut.mapped.parts
        if [part.shape for part in parts] != [*shapes]:
            recorded = _show([part.shape for part in parts])
            raise _mismatch(name, f"is of shapes {_show(shapes)} where its map has {recorded}")
        return cut.mapped.shape, [part.slabs for part in parts]
    if cut.axis is None or len(shapes) == 1:
        if any(shape != shapes[0] for shape in shapes):
            raise _mismatch(name, f"is the same on all ranks but of shapes {_show(shapes)}")
        return shapes[0], [(Slab(Box.whole(shape), Box.whole(shape)),) for shape in shapes]
    axis = cut.axis
    others = {(*s[:axis], *s[axis + 1 :]) for s in shapes}
    if len(others) != 1 or any(len(s) <= axis for s in shapes):
        raise _mismatch(name, f"is cut along axis {axis} into parts of shapes {_show(shapes)}")
    rows = [shape[axis] for shape in shapes]
    widths = cut.widths or _even(name, cut.blocks or (1,), rows)
    held = [sum(block[rank] for block in widths) for rank in range(len(rows))]
    if any(len(block) != len(rows) for block in widths) or held != rows:
        raise _mismatch(name, f"has {rows} rows on its ranks where {held} are recorded")
    starts = [0, *accumulate(sum(block) for block in widths)]
    found: list[tuple[Slab, ...]] = []
    for rank, shape in enumerate(shapes):
        inside, mine = 0, []
        for begin, block in zip(starts, widths, strict=False):
            size = block[rank]
            if size:
                at = begin + sum(block[:rank])
                mine.append(Slab(_along(shape, axis, at, size), _along(shape, axis, inside, size)))
            inside += size
        found.append(tuple(mine))
    return (*shapes[0][:axis], starts[-1], *shapes[0][axis + 1 :]), found


def _even(name: str, blocks: Sequence[int], rows: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    unit = sum(blocks)
    if any(r % unit for r in rows):
        raise _mismatch(name, f"packs {len(blocks)} sub-blocks into {rows} rows")
    return tuple(tuple(r // unit * weight for r in rows) for weight in blocks)


def _along(shape: Shape, axis: int, begin: int, size: int) -> Box:
    offsets = tuple(begin if d == axis else 0 for d in range(len(shape)))
    return Box(offsets, (*shape[:axis], size, *shape[axis + 1 :]))


def _mismatch(name: str, what: str) -> CorruptError:
    return CorruptError(f"{name} {what}", kind="shape-mismatch", tensor=name)


def _show(shapes: Sequence[Shape]) -> str:
    return " and ".join(str(list(s)) for s in dict.fromkeys(shapes))


CutOf = Callable[[str, Sequence[Shape]], SliceCut]


def cuts_of(state: ModelState, rules: Rules | None, *, with_maps: bool = True) -> CutOf:
    """Return what finds the cut of a parameter by its name and its parts' shapes.

    Args:
        state: a model's file of the checkpoint; what it records decides.
        rules: the user's table, which is asked first; None where there is none.
        with_maps: whether affine maps are asked, which hold for as many ranks as the job has.

    Raises:
        UnsupportedError: the file records a pattern that cannot be used. The returned function
            raises it for a name that no rule matches.
    """
    if state.info is not None:
        recorded = _Recorded(state.info, state.file.path)

        def of_record(name: str, shapes: Sequence[Shape]) -> SliceCut:
            return _by_rule(rules, name) or recorded.cut(name, shapes, with_maps=with_maps)

        return of_record
    known = rules or Rules("DeepSpeed", ())
    if isinstance(state.args, Inert) and state.args.get("swiglu") is not None:
        values = {"gated": int(bool(state.args.get("swiglu")))}
        table = built_in("megatron-deepspeed", values)
        known = table if rules is None else rules.before(table)
    return lambda name, shapes: _of_split(known.find(name).split)


def _by_rule(rules: Rules | None, name: str) -> SliceCut | None:
    rule = None if rules is None else rules.get(name)
    return None if rule is None else _of_split(rule.split)


def _of_split(split: Split) -> SliceCut:
    return SliceCut(split.axis, blocks=split.blocks)


class _Recorded:
    """The patterns of `universal_checkpoint_info`."""

    def __init__(self, info: Mapping[str, Any], file: str) -> None:
        self._file = file
        self._unsupported = self._patterns(info.get("autotp_unsupported_parameter_patterns"))
        maps = info.get("affine_map")
        maps = maps if isinstance(maps, dict) else {}
        if maps.get("version", VERSION) != VERSION:
            raise self._odd(f"affine maps of version {str(maps.get('version'))[:20]}")
        params = maps.get("params")
        self._maps: dict[str, Any] = params if isinstance(params, dict) else {}
        self._mapped = self._patterns(self._maps)
        self._expert = self._patterns(info.get("expert_parameter_patterns"))
        self._same = self._patterns(info.get("tp_replicated_parameter_patterns"))
        self._average = self._patterns(info.get("parameter_to_average_patterns"))
        self._pair = self._patterns(info.get("parameter_with_2_sub_params_cat_dim_0"))
        self._row = self._patterns(info.get("parameter_with_row_parallelism_patterns"))
        self._packed = info.get("parameter_with_sub_params") or ()
        widths = info.get("sub_param_shard_widths")
        self._widths = widths if isinstance(widths, dict) else {}

    def cut(self, name: str, shapes: Sequence[Shape], *, with_maps: bool) -> SliceCut:
        if len(shapes) == 1:
            return WHOLE
        for patterns, why in (
            (self._unsupported, "the job that wrote it recorded no way to merge it"),
            (self._expert, "it is a parameter of experts"),
        ):
            if _matched(patterns, name):
                raise UnsupportedError(f"{name} cannot be merged: {why}", tensor=name)
        pattern = _matched(self._mapped, name)
        if pattern is not None and with_maps:
            return SliceCut(mapped=read_map(self._maps[pattern.pattern], name))
        if _matched(self._same, name):
            return WHOLE
        if _matched(self._average, name):
            return SliceCut(averaged=True)
        if _matched(self._pair, name):
            return SliceCut(0, blocks=(1, 1))
        packed = self._sub_blocks(name, shapes)
        if packed is not None:
            return packed
        return SliceCut(1 if _matched(self._row, name) else 0)

    def _sub_blocks(self, name: str, shapes: Sequence[Shape]) -> SliceCut | None:
        for entry in self._packed if isinstance(self._packed, (list, tuple)) else ():
            record = entry if isinstance(entry, dict) else {}
            patterns = self._patterns(record.get("patterns"))
            pattern = _matched(patterns, name)
            if pattern is None:
                continue
            axis, shape = record.get("partition_dim"), record.get("shape")
            if type(axis) is not int or not isinstance(shape, (list, tuple)) or axis >= len(shape):
                raise self._odd(f"sub-parameters of {name} without a shape")
            if axis < 0 or axis >= len(shapes[0]):
                raise self._odd(f"{name} is viewed in another shape than its own")
            sizes = shape[axis]
            widths = self._widths.get(pattern.pattern)
            if widths is not None:
                return SliceCut(axis, self._table(widths, name))
            if isinstance(sizes, (list, tuple)):
                return SliceCut(axis, self._shares(self._sizes(sizes, name), len(shapes), name))
            # Before version 0.4 a number there is a count of equal sub-blocks.
            if type(sizes) is int and 0 < sizes <= 64:
                return SliceCut(axis, blocks=(1,) * sizes)
            raise self._odd(f"sub-parameters of {name} without sizes")
        return None

    def _shares(self, sizes: Sequence[int], ranks: int, name: str) -> tuple[tuple[int, ...], ...]:
        """Return the rows of each rank where no widths are recorded: they are even then."""
        if any(size % ranks for size in sizes):
            raise self._odd(f"sub-parameters of {name} that {ranks} ranks cannot share evenly")
        return tuple((size // ranks,) * ranks for size in sizes)

    def _table(self, widths: Any, name: str) -> tuple[tuple[int, ...], ...]:
        if not isinstance(widths, (list, tuple)):
            raise self._odd(f"widths of {name} that are no table")
        return tuple(self._sizes(row, name, least=0) for row in widths)

    def _sizes(self, sizes: Any, name: str, least: int = 1) -> tuple[int, ...]:
        if not isinstance(sizes, (list, tuple)) or any(
            type(n) is not int or n < least for n in sizes
        ):
            raise self._odd(f"sizes of {name} that are no lengths")
        return tuple(sizes)

    def _patterns(self, value: Any) -> list[re.Pattern[str]]:
        """Compile a list of patterns, which are matched at the start of a name as DeepSpeed does.

        A repeated group is refused: on a long name it can take for ever.
        """
        found = []
        for text in value or () if isinstance(value, (list, tuple, dict)) else ():
            plain = isinstance(text, str) and len(text) <= MAX_PATTERN
            if not plain or re.search(r"\)[*+?{]", text):
                raise self._odd("a pattern of names that is not a short regular expression")
            try:
                found.append(re.compile(text))
            except (re.error, RecursionError, OverflowError):
                raise self._odd("a pattern of names that is not a regular expression") from None
        return found

    def _odd(self, what: str) -> UnsupportedError:
        return UnsupportedError(
            f"universal_checkpoint_info in {self._file} has {what}", file=self._file
        )


def _matched(patterns: Sequence[re.Pattern[str]], name: str) -> re.Pattern[str] | None:
    return next((pattern for pattern in patterns if pattern.match(name)), None)
