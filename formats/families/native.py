"""Translate tensors between Hugging Face's names and those of other model code, by a table's rows.

    [[native]]
    torchtitan = ["…qkv_linear.wq.weight", "….wq.weight"]    # all are read, the first is written
    meta = "layers.{layer}.attention.wq.weight"
    hf = "model.layers.{layer}.self_attn.q_proj.weight"
    rotated = "queries"       # or "keys": rows of each head are in the order of another rotation
    transposed = true         # the last two axes are the other way round
    join = "stacked"          # several of Hugging Face's, one below the other
    vocabulary = true         # rows may end in padding
    output = true             # it is the embedding where a model is tied
    share = "columns 1/2"     # it is this part of Hugging Face's: `views.shares`
    flat = true               # all axes but the first are one

A row whose `hf` has `{expert}` and whose names have not holds all experts along its first axis.
Where a transposed tensor has one name on both sides, shapes tell on which it is. Masters and
moments follow their parameter. Elements change places and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from ftckpt.checkpoint import Box, Kind
from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.findings import counted, listed
from ftckpt.formats.huggingface.config import CONFIG
from ftckpt.transfer.content import Content, Copy, TargetTensor
from ftckpt.transfer.request.renaming import parameter_names, parted

from .facts import equal, outputs_of, require_tied, weights_of
from .shapes import Name, require_same
from .tables import OF_EXPERTS, Family, NativeEntry
from .views import FlatState, TensorViews
from .views.joins import Heads, Join, part_rows, runs
from .views.shares import Order, Share, cut_share, is_scalar, joined_shares

_AS_IT_IS = NativeEntry({}, (), Join.WHOLE, "", False, False, False)


class NativeMatch(NamedTuple):
    """Where a table has a name.

    Attributes:
        entry: of which row it is.
        part: which of its parts; 0 for a whole.
        numbers: of its layer and its expert.
    """

    entry: NativeEntry
    part: int
    numbers: Mapping[str, str]


class NativeTranslator:
    """Translates one family for one model."""

    def __init__(
        self,
        family: Family,
        heads: Heads,
        config: Mapping[str, Any],
        *,
        true_vocab_size: int | None = None,
    ) -> None:
        """Keep what every tensor is translated by.

        Args:
            family: the table.
            heads: shape of attention.
            config: of the model, which gives the shape of every tensor.
            true_vocab_size: rows of a vocabulary that are no padding, where the user says so; the
                others are cut. None cuts nothing: rows that `config` does not have are refused.

        Raises:
            UnsupportedError: the table has no shapes.
            UsageError: `config` gives no shapes.
        """
        if family.shapes is None:
            raise UnsupportedError(
                f"no table says how other model code stores {family.name}", kind="unknown-rule"
            )
        self._family = family
        self._heads = heads
        self._rows = true_vocab_size
        rows = true_vocab_size or config.get("vocab_size")
        self._shapes = family.shapes.tensors({**config, "vocab_size": rows})
        self._outputs = outputs_of(family)

    # --- to Hugging Face --------------------------------------------------------------------------

    def to_hugging_face(self, content: Content) -> Content:
        """Return the content under Hugging Face's names and in its shapes.

        Raises:
            UnsupportedError: a parameter that the family does not have, or that is stored so that
                no view shows it.
            UsageError: the model is not what its configuration says.
        """
        parameters = parameter_names(content.tensors.values())
        views = TensorViews(content.checkpoint)
        made: dict[str, TargetTensor] = {}
        left_out: list[str] = []
        shares: dict[tuple[str, str, str], dict[Share, TargetTensor]] = {}
        orders: dict[tuple[str, str, str], dict[Share, Order]] = {}
        as_in_files = not self._lies_as_in_memory(content, parameters)

        # Whence each new tensor came: a parameter may stand there under several names of its row.
        held: dict[str, tuple[NativeEntry, TargetTensor]] = {}

        def put(
            new: TargetTensor, entry: NativeEntry = _AS_IT_IS, of: TargetTensor | None = None
        ) -> None:
            if of is not None and new.key in made:
                row, first = held.get(new.key, (None, of))
                if row is entry and first is not of:
                    if equal(first, of, content.checkpoint):
                        return
                    raise UnsupportedError(
                        f"{first.key} and {of.key} are names of one parameter, and their values"
                        " differ",
                        hint="--drop leaves one of them out",
                        tensor=of.key,
                    )
            if of is not None:
                held.setdefault(new.key, (entry, of))
            if new.key in made:
                raise UnsupportedError(
                    f"two tensors of the source become {new.key}", tensor=new.key
                )
            made[new.key] = new

        for key, wanted in content.tensors.items():
            if wanted.component.startswith("extra:"):
                made[key] = wanted
                continue
            parameter, rest = parted(wanted, parameters)
            found = self.native(parameter)
            if found is None:
                left_out.append(key)
                continue
            if found.entry.turns_alone and as_in_files:
                put(wanted)
                continue
            if found.entry.share:
                name = found.entry.hf[0].fill(found.numbers) + rest
                whole = wanted.component, wanted.kind.value, name
                shares.setdefault(whole, {})[found.entry.share] = wanted
                orders.setdefault(whole, {})[found.entry.share] = self._order(found.entry)
                continue
            for name, part in self._parts(wanted, found, views):
                put(part._replace(name=name + rest), found.entry, wanted)
        for whole, parts in shares.items():
            put(joined_shares(views, parts, whole[2], orders[whole]))
        self._require_model(weights_of(made), cuts=True)
        require_tied(self._outputs, made, self._shapes, views.checkpoint)
        said = _left_out(left_out)
        return replace(
            content, checkpoint=views.finished(), tensors=made, aliases={},
            dropped=(*content.dropped, *said),
        )  # fmt: skip

    def _lies_as_in_memory(self, content: Content, parameters: frozenset[str]) -> bool:
        """Say whether tensors that have one name on both sides lie as other model code has them.

        Raises:
            UsageError: shapes do not tell, or tell both.
        """
        if not any(entry.turns_alone for entry in self._family.natives):
            return False
        seen: dict[bool, str] = {}
        undecided = ""
        for key, wanted in content.tensors.items():
            name = parted(wanted, parameters)[0]
            shape = self._shapes.get(name, ())
            found = next(_matches(self._family, name), None)
            if found is None or not found.entry.turns_alone or len(wanted.shape) != len(shape):
                continue
            if shape == _exchanged(shape, turned=True):
                undecided = undecided or key
            elif wanted.shape == shape:
                seen.setdefault(False, key)
            elif wanted.shape == _exchanged(shape, turned=True):
                seen.setdefault(True, key)
        if len(seen) > 1 or (undecided and not seen):
            told = (
                f"{seen[False]} lies as in files and {seen[True]} as in memory"
                if seen
                else (f"nothing tells whether {undecided} lies as in files or as in memory")
            )
            raise UsageError(f"{self._family.name}: {told}", tensor=undecided or seen[True])
        return True in seen

    def native(self, name: str) -> NativeMatch | None:
        """Return the place of a name of other model code; None for what is derived.

        Raises:
            UnsupportedError: the family has no such parameter.
        """
        found = next(_matches(self._family, name), None)
        own = name in self._shapes or name in self._outputs  # its name on Hugging Face's side
        if found is None and own:
            return NativeMatch(_AS_IT_IS._replace(hf=(Name.of(name),)), 0, {})
        if found is None and not any(d.numbers(name) is not None for d in self._family.derived):
            raise UnsupportedError(
                f"{self._family.name} has no parameter that is called {name}",
                hint="--rename gives it another name first, --drop leaves it out",
                kind="unknown-rule",
                tensor=name,
            )
        return found

    def _parts(
        self, wanted: TargetTensor, place: NativeMatch, views: TensorViews
    ) -> Iterator[tuple[str, TargetTensor]]:
        """Yield the tensors of Hugging Face's in one of other model code, with their names."""
        entry = place.entry
        if is_scalar(wanted):
            for numbers in self._experts(place):
                for name in entry.hf:
                    yield name.fill(numbers), wanted
            return
        if entry.rotated:
            self._require_heads(wanted, entry)
            wanted = views.rotate(wanted, self._heads.width, halves=True)
        if entry.flat:
            shape = self._shapes.get(entry.hf[0].fill(place.numbers), wanted.shape)
            wanted = views.reshape(wanted, shape)
        experts = list(self._experts(place))
        known = entry.hf[0].fill(experts[0]) in self._shapes  # else refused as too many
        if entry.stacked and known and wanted.shape[:1] != (len(experts),):
            raise UsageError(
                f"{wanted.key} of {list(wanted.shape)} does not hold the {len(experts)} experts"
                f" that {CONFIG} describes",
                tensor=wanted.key,
            )
        for numbers in experts:
            whole = wanted
            if entry.stacked or (entry.transposed and len(wanted.shape) > 1):
                whole = self._slice(wanted, entry, numbers, views)
            whole = self._cut(whole, entry)
            yield from self._split(whole, entry, numbers)

    def _slice(
        self,
        wanted: TargetTensor,
        entry: NativeEntry,
        numbers: Mapping[str, str],
        views: TensorViews,
    ) -> TargetTensor:
        """Return one expert of a stack, axes exchanged where they are to be."""
        info = views.source(wanted)
        axes = list(range(len(info.shape)))
        fixed = {}
        if entry.stacked:
            fixed = {axes.pop(0): int(numbers["expert"])}
        if entry.transposed and len(axes) > 1:
            axes[-2:] = axes[:-3:-1]
        key = views.show(info, fixed, [[axis] for axis in axes])
        shape = tuple(info.shape[axis] for axis in axes)
        box = Box.whole(shape)
        return wanted._replace(shape=shape, copies=(Copy(box, key, box),))

    def _split(
        self, whole: TargetTensor, entry: NativeEntry, numbers: Mapping[str, str]
    ) -> Iterator[tuple[str, TargetTensor]]:
        count = len(entry.hf)
        sizes = part_rows(entry.join, count, whole.shape[0], self._heads)
        if sizes is None:
            raise UsageError(
                f"{whole.key} of {list(whole.shape)} is not made of {count} {entry.join} parts"
            )
        cut = list(runs(entry.join, count, whole.shape[0], self._heads))
        for part, (name, size) in enumerate(zip(entry.hf, sizes, strict=True)):
            copies = [
                copy
                for run in cut
                if run.part == part
                for copy in whole.moved(_rows(whole.shape, run.joined, run.rows), run.inside)
            ]
            shape = (size, *whole.shape[1:])
            yield name.fill(numbers), whole._replace(shape=shape, copies=tuple(copies))

    def _experts(self, place: NativeMatch) -> Iterator[Mapping[str, str]]:
        """Yield the numbers of each expert in a stack, or those of the one tensor."""
        if not place.entry.stacked:
            yield place.numbers
            return
        counts = self._family.shapes.counts if self._family.shapes else {}
        if "expert" not in counts:
            raise UsageError(f"the table of {self._family.name} does not count experts")
        number = 0
        while place.entry.hf[0].fill({**place.numbers, "expert": str(number)}) in self._shapes:
            yield {**place.numbers, "expert": str(number)}
            number += 1
        if not number:  # no such layer, or a dense one: refused as too many
            yield {**place.numbers, "expert": "0"}

    def _cut(self, whole: TargetTensor, entry: NativeEntry) -> TargetTensor:
        if not entry.vocabulary or self._rows is None or whole.shape[0] <= self._rows:
            return whole
        copies = tuple(whole.moved(_rows(whole.shape, 0, self._rows), 0))
        return whole._replace(shape=(self._rows, *whole.shape[1:]), copies=copies)

    def _require_heads(self, wanted: TargetTensor, entry: NativeEntry) -> None:
        heads = self._heads.queries if entry.rotated == "queries" else self._heads.groups
        if wanted.shape[0] != heads * self._heads.width or self._heads.width % 2:
            raise UsageError(
                f"{wanted.key} of {list(wanted.shape)} does not hold {heads} heads of width "
                f"{self._heads.width}",
                tensor=wanted.key,
            )

    def _require_model(self, weights: Mapping[str, tuple[int, ...]], *, cuts: bool = False) -> None:
        """Refuse weights that are not exactly those of the configuration.

        A tied model may have its output layer, too: torchtitan saves it.

        Args:
            weights: shapes by Hugging Face's names.
            cuts: whether the user could have had rows of padding cut.
        """
        if not weights:  # an optimizer alone
            return
        wanted = dict(self._shapes)
        for output, embedding in self._outputs.items():
            if output in weights:
                wanted.setdefault(output, wanted.get(embedding, ()))
        hint = ""
        for entry in self._family.natives:
            name = entry.hf[0].text
            ours, theirs = wanted.get(name, ()), weights.get(name, ())
            if cuts and entry.vocabulary and ours[:1] < theirs[:1] and ours[1:] == theirs[1:]:
                hint = f"--true-vocab-size {ours[0]} cuts the rows behind, where they are padding"
        require_same(wanted, weights, self._family.name, hint)

    def _embedding(self, dialect: str = "") -> NativeEntry:
        """Return the row of the embedding, which a tied output layer is.

        Raises:
            UsageError: the table has none.
        """
        for entry in self._family.natives:
            if entry.vocabulary and not entry.output and (not dialect or dialect in entry.names):
                return entry
        raise UsageError(
            f"the table of {self._family.name} has an output layer and no embedding",
            hint="its row has vocabulary = true",
        )

    # --- from Hugging Face ------------------------------------------------------------------------

    def from_hugging_face(self, content: Content, dialect: str) -> Content:
        """Return the content under the names and in the shapes of other model code.

        Args:
            content: under Hugging Face's names.
            dialect: whose code, of `tables.DIALECTS`.

        Raises:
            UnsupportedError: a parameter that the family does not have there, or that is stored so
                that no view shows it.
            UsageError: the model is not what its configuration says.
        """
        if not any(dialect in entry.names for entry in self._family.natives):
            raise UnsupportedError(
                f"no table says how {dialect} stores {self._family.name}", kind="unknown-rule"
            )
        derived = self._family.derived
        weights = {
            name: shape
            for name, shape in weights_of(content.tensors).items()
            if not any(known.numbers(name) is not None for known in derived)
        }
        prefix = self._family.prefix
        bare = {n for n in weights if n not in self._shapes and prefix + n in self._shapes}
        if bare:
            raise UnsupportedError(
                f"a model without its head ({listed(sorted(bare), 2)}) has no form of {dialect}"
            )
        self._require_model(weights)
        return self._gathered(content, dialect)

    def _gathered(self, content: Content, dialect: str) -> Content:
        parameters = parameter_names(content.tensors.values())
        views = TensorViews(content.checkpoint)
        made: dict[str, TargetTensor] = {}
        wholes: dict[tuple[str, str, str], dict[tuple[int, int], TargetTensor]] = {}
        places: dict[tuple[str, str, str], NativeMatch] = {}
        left_out: list[str] = []
        for key, wanted in content.tensors.items():
            if wanted.component.startswith("extra:"):
                made[key] = wanted
                continue
            parameter, rest = parted(wanted, parameters)
            found = self.hugging_face(parameter, dialect)
            if found is None:
                left_out.append(key)
                continue
            if found.entry.share:
                for share, entry in self._shares(found.entry, dialect).items():
                    name = entry.names[dialect][0].fill(found.numbers) + rest
                    new = cut_share(views, wanted, name, share, self._order(entry))
                    made[new.key] = new
                continue
            name = found.entry.names[dialect][0].fill(found.numbers) + rest
            whole = wanted.component, wanted.kind.value, name
            number = int(found.numbers["expert"]) if found.entry.stacked else 0
            parts = wholes.setdefault(whole, {})
            if (number, found.part) in parts:
                raise UnsupportedError(
                    f"{key} and {parts[number, found.part].key} become one tensor, {name}",
                    tensor=key,
                )
            parts[number, found.part] = wanted
            places[whole] = found
        counters = 0
        for whole, parts in wholes.items():
            new = self._whole(whole[2], parts, places[whole].entry, views)
            made[new.key] = new
            counters += len(parts) - 1 if is_scalar(next(iter(parts.values()))) else 0
        if counters:
            left_out.append(f"{counted(counters, 'counter')} of parts, equal to their first part's")
        self._tie(made, dialect)
        return replace(
            content, checkpoint=FlatState.of(views.finished(), made), tensors=made, aliases={},
            dropped=(*content.dropped, *_left_out(left_out)),
        )  # fmt: skip

    def hugging_face(self, name: str, dialect: str) -> NativeMatch | None:
        """Return the place of a name of Hugging Face's; None for what is derived.

        Raises:
            UnsupportedError: the dialect has no such parameter.
        """
        for entry in self._family.natives:
            if dialect not in entry.names:
                continue
            for part, known in enumerate(entry.hf):
                numbers = known.numbers(name)
                if numbers is not None:
                    return NativeMatch(entry, part, numbers)
        if any(known.numbers(name) is not None for known in self._family.derived):
            return None
        if dialect in OF_EXPERTS:  # all others have one name in memory and in files
            own = Name.of(name)
            return NativeMatch(_AS_IT_IS._replace(names={dialect: (own,)}, hf=(own,)), 0, {})
        raise UnsupportedError(
            f"{dialect}'s {self._family.name} has nothing for {name}",
            hint="--drop leaves it out",
            kind="unknown-rule",
            tensor=name,
        )

    def _order(self, entry: NativeEntry) -> Order:
        return Order(entry.transposed, self._heads.width if entry.rotated else 0)

    def _shares(self, entry: NativeEntry, dialect: str) -> dict[Share, NativeEntry]:
        """Return the rows of all parts of a tensor.

        Raises:
            UsageError: the table lacks one of them, or has one twice.
        """
        found = [
            (one.share, one)
            for one in self._family.natives
            if dialect in one.names and one.share and one.hf[0].text == entry.hf[0].text
        ]
        first = found[0][0]
        wanted = [Share(first.rows, number, first.parts) for number in range(first.parts)]
        if sorted(share for share, _ in found) != wanted:
            raise UsageError(
                f"the table of {self._family.name} does not have each part of"
                f" {entry.hf[0].text} once"
            )
        return dict(found)

    def _whole(
        self,
        name: str,
        parts: Mapping[tuple[int, int], TargetTensor],
        entry: NativeEntry,
        views: TensorViews,
    ) -> TargetTensor:
        """Return one tensor of other model code, made of all its parts."""
        some = next(iter(parts.values()))
        experts = 1 + max(number for number, _ in parts)
        ordered = [
            parts[number, part]
            for number in range(experts)
            for part in range(len(entry.hf))
            if (number, part) in parts
        ]
        if len(ordered) != experts * len(entry.hf):
            raise UnsupportedError(
                f"{name} is made of {experts * len(entry.hf)} tensors, and {len(ordered)} of them"
                f" are there ({listed([p.key for p in ordered], 2)})",
                tensor=some.key,
            )
        if len({(part.dtype, part.shape[1:], len(part.shape)) for part in ordered}) > 1:
            raise UnsupportedError(
                f"the parts of {name} differ in type or shape, so that they make no one tensor",
                tensor=some.key,
            )
        if is_scalar(some):
            return some._replace(name=name)
        if entry.rotated:
            self._require_heads(some, entry)
            return views.rotate(some, self._heads.width, halves=False)._replace(name=name)
        if entry.flat:
            shape = some.shape[0], prod(some.shape[1:])
            return views.reshape(some, shape)._replace(name=name)
        turned = entry.transposed and len(some.shape) > 1
        if not entry.stacked and not turned and len(ordered) == 1:
            return some._replace(name=name)
        return self._put_together(name, ordered, entry, views, turned=turned)

    def _put_together(
        self,
        name: str,
        ordered: list[TargetTensor],
        entry: NativeEntry,
        views: TensorViews,
        *,
        turned: bool,
    ) -> TargetTensor:
        count = len(entry.hf)
        each = [ordered[n : n + count] for n in range(0, len(ordered), count)]
        rows = sum(part.shape[0] for part in each[0])
        lead = 1 if entry.stacked else 0
        rest = ordered[0].shape[1:]
        sizes = part_rows(entry.join, count, rows, self._heads)
        if any(sizes != [part.shape[0] for part in parts] for parts in each):
            raise UsageError(f"the parts of {name} have rows that make no {entry.join} whole")
        shape = ((len(each),) if lead else ()) + _exchanged((rows, *rest), turned)
        axes = _exchanged(tuple(range(len(rest) + 1)), turned)
        groups: list[list[int]] = [[] for _ in range(lead)] + [[axis] for axis in axes]

        def placed(box: Box, number: int) -> Box:
            offsets, sizes = _exchanged(box.offsets, turned), _exchanged(box.sizes, turned)
            return Box((number,) * lead + offsets, (1,) * lead + sizes)

        copies = []
        for number, parts in enumerate(each):
            for run in runs(entry.join, count, rows, self._heads):
                part = parts[run.part]
                for copy in part.moved(_rows(part.shape, run.inside, run.rows), run.joined):
                    key = views.show(views.checkpoint.tensors[copy.key], {}, groups)
                    copies.append(Copy(placed(copy.box, number), key, placed(copy.source, 0)))
        return ordered[0]._replace(name=name, shape=shape, copies=tuple(copies))

    def _tie(self, made: dict[str, TargetTensor], dialect: str) -> None:
        """Give a tied model its output layer, which other model code saves beside the embedding."""
        for entry in self._family.natives:
            if not entry.output or dialect not in entry.names:
                continue
            name = entry.names[dialect][0].text
            source = self._embedding(dialect).names[dialect][0].text
            for wanted in [w for w in made.values() if w.name == source]:
                new = wanted._replace(name=name)
                if wanted.kind is Kind.PARAM and new.key not in made:
                    made[new.key] = new


def is_hugging_face(content: Content, family: Family) -> bool:
    """Say whether parameters have Hugging Face's own names: a plain model that DCP has saved."""
    known = family.shapes.rules.values() if family.shapes is not None else ()
    return any(
        any(rule.name.numbers(name) is not None for rule in known if rule.axes)
        for name in parameter_names(content.tensors.values())
    )


def is_headless(content: Content, family: Family) -> bool:
    """Say whether a model was saved without its head: each of its names lacks the prefix.

    Experts may be packed, as the model has them in memory.
    """
    if not family.prefix or family.shapes is None:
        return False
    known = [rule.name for rule in family.shapes.rules.values() if rule.axes]
    known += [name for entry in family.natives for name in entry.names.get("packed", ())]
    known += family.derived
    names = parameter_names(content.tensors.values())
    return bool(names) and all(
        not name.startswith(family.prefix)
        and any(one.numbers(family.prefix + name) is not None for one in known)
        for name in names
    )


def is_native(content: Content, family: Family) -> bool:
    """Say whether parameters have names of other model code, and not Hugging Face's.

    A model without its head lacks the prefix of its names: `norm.weight` is torchtitan's, too.
    """
    hf = [name for native in family.natives for name in native.hf]
    hf += [name for entry in family.entries for name in entry.hf]
    return any(
        next(_matches(family, name), None) is not None
        and not any(
            known.numbers(own) is not None for known in hf for own in (name, family.prefix + name)
        )
        for name in parameter_names(content.tensors.values())
    )


def _matches(family: Family, name: str) -> Iterator[NativeMatch]:
    for entry in family.natives:
        for names in entry.names.values():
            for known in names:
                numbers = known.numbers(name)
                if numbers is not None:
                    yield NativeMatch(entry, 0, numbers)


def _rows(shape: tuple[int, ...], begin: int, rows: int) -> Box:
    return Box((begin, *(0 for _ in shape[1:])), (rows, *shape[1:]))


def may_turn(content: Content, family: Family) -> bool:
    """Say whether shapes alone tell in which of two ways some parameters lie."""
    return any(
        found.entry.turns_alone
        for name in parameter_names(content.tensors.values())
        for found in _matches(family, name)
    )


def _exchanged(axes: tuple[int, ...], turned: bool) -> tuple[int, ...]:
    return (*axes[:-2], axes[-1], axes[-2]) if turned else axes


def _left_out(keys: list[str]) -> tuple[str, ...]:
    return (f"derived from the configuration: {listed(keys, 3)}",) if keys else ()
