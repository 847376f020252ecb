"""Check that everything is present, once, and of one save; reads no tensor bytes.

A sealed checkpoint is also compared with the names and sizes of its manifest.
"""

from __future__ import annotations

import json
import re
from collections import Counter as Count
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ftckpt.checkpoint import Checkpoint, CommitState, Extent, Kind, Piece, TensorInfo
from ftckpt.checkpoint.coverage import check_coverage
from ftckpt.checkpoint.steps import mixed_steps
from ftckpt.discovery.step_names import says_other_step, step_in_name
from ftckpt.errors import ExitCode, FtckptError, NoResourceError
from ftckpt.findings import Finding, Severity, counted, finding, from_error, listed
from ftckpt.manifest import Manifest
from ftckpt.manifest.locate import find
from ftckpt.own_files import MANIFEST, VOUCHERS, is_leftover, is_own
from ftckpt.progress import NULL, Counter
from ftckpt.storage.source import (
    LFS_POINTER,
    MAX_POINTER,
    Source,
    followed_links,
    leads_nowhere,
)
from ftckpt.storage.state_files import is_exported, is_text_of_state, may_hold_tensors
from ftckpt.storage.store import EntryKind
from ftckpt.strict_json import is_cut

from .evidence import ASKED_FOR, Report
from .moments import check_states, check_weights

if TYPE_CHECKING:
    from concurrent.futures import Future

    from ftckpt.inspection import Inspection

# Files of tensors or state, for "this file shows no step"; the rest is configuration.
_DATA = re.compile(r"\.(?:distcp|pt|pth|bin|ckpt|safetensors|pkl)$")
# What parts the names of files in a sentence.
_WORDS = r"[\s,()]+"
_STRAYS_NAMED = 10
# A tokenizer's JSON can be large; of that the begin is enough to tell zeros.
_MOST_JSON = 1 << 20
_MOST_SMALL = 1000

# Findings that a file written anew after the manifest can cause.
_DIFFERS = frozenset({"truncated-file", "trailing-bytes", "added-file", "bad-digest"})

_TICK = 0.5  # seconds that a wait may delay a signal


def check_structure(
    checkpoint: Checkpoint, counter: Counter, seal: Seal | None = None
) -> Iterator[Finding]:
    """Yield every defect of structure, the cheapest first.

    `seal` is the manifest to compare with; None: the one beside the data.

    Raises:
        UnavailableError, DeniedError: the storage does not answer.
    """
    seal = seal or Seal(checkpoint.source)
    seal.begin()
    lost: set[str] = set()
    sound = True
    for found in _check(checkpoint, counter):
        lost.add(found.kind)
        sound &= found.severity is not Severity.ERROR
        yield _weighed(checkpoint, found, lost)
    if sound:  # else that may be why, and it says more
        yield from check_weights(checkpoint)
    yield from check_listing(checkpoint, seal)


def with_structure(result: Inspection, checkpoint: Checkpoint) -> Inspection:
    """Return what a checkpoint holds with the errors of its structure among the notes.

    The resume check goes by names: they may be there, and the files of what they name lost or cut.

    Raises:
        UnavailableError, DeniedError: the storage does not answer.
    """
    errors = (f for f in check_structure(checkpoint, NULL) if f.severity is Severity.ERROR)
    told = {*result.notes}
    new = [found for found in errors if found not in told]
    return replace(result, notes=(*result.notes, *new))


def _weighed(checkpoint: Checkpoint, found: Finding, kinds: set[str]) -> Finding:
    """Return a finding with the severity for the commit state.

    A missing rank's file is damage if the save is known to have finished. Otherwise it may still be
    written, and so may the elements that are missing with it.
    """
    marked = (
        checkpoint.commit.state is CommitState.COMMITTED or MANIFEST in checkpoint.source.entries
    )
    if marked or found.code is not ExitCode.CORRUPT:
        return found
    absent = found.kind == "missing-rank" or (found.kind == "hole" and "missing-rank" in kinds)
    return replace(found, code=ExitCode.INCOMPLETE) if absent else found


def _check(checkpoint: Checkpoint, counter: Counter) -> Iterator[Finding]:
    yield from checkpoint.notes
    members = set(checkpoint.members())
    absent = dict.fromkeys(_check_members(checkpoint, members))
    yield from absent
    told = {f.kind for f in checkpoint.notes}
    reported: set[tuple[str, str | None]] = set()
    apart: list[str] = []
    for found in checkpoint.check(counter):
        reported.add((found.kind, found.file))
        if found.kind == "clocks-differ":
            apart.append(found.message)
        if found not in absent:  # a reader found the same
            yield found
    if checkpoint.described is not None:
        yield from checkpoint.described(checkpoint)
    if "link-followed" not in told | {kind for kind, _ in reported}:
        yield from followed_links(checkpoint.source, members)
    seen = {file for _, file in reported}
    yield from _check_configuration(checkpoint, members - seen)
    yield from _check_strays(checkpoint, members, seen)
    yield from _check_tensors(checkpoint, counter, reported)
    yield from check_states(checkpoint)
    yield from _check_steps(checkpoint, apart)


def _check_members(checkpoint: Checkpoint, members: set[str]) -> Iterator[Finding]:
    """Check that members exist and are readable."""
    absent = sorted(members - checkpoint.source.entries.keys())
    for name in absent[:ASKED_FOR]:
        checkpoint.source.require_absent(name)
    for name in sorted(members):
        entry = checkpoint.source.entries.get(name)
        if entry is None:
            yield finding("missing-file", f"{name} is missing", file=name)
        elif entry.dangling:
            yield from_error(leads_nowhere(name, entry))
        elif entry.kind is EntryKind.SPECIAL:
            yield finding("special-file", f"{name} is not a regular file", file=name)
        elif entry.differs:
            message = f"the copies of {name} differ: {entry.differs}"
            yield finding("copies-differ", message, file=name)
        elif entry.archived:
            yield finding(
                "archived-object", f"{name} is in an archive tier: restore it first", file=name
            )


def _check_configuration(checkpoint: Checkpoint, members: Iterable[str]) -> Iterator[Finding]:
    """Yield JSON files that are none: formats read some of them, trainers and libraries the rest.

    A file of any kind may be a Git LFS pointer.

    A crash leaves small files empty, cut, or full of zeros, although their names are there.
    """
    entries = checkpoint.source.entries
    small = {name for name in members if name in entries and entries[name].size <= MAX_POINTER}
    if len(small) > _MOST_SMALL:  # the chunks of a store, and no clone
        small = set()
    wanted = [
        Extent(name, 0, min(entry.size, _MOST_JSON))
        for name in sorted(members)
        if (entry := entries.get(name)) is not None
        and entry.kind is EntryKind.FILE
        and (name.endswith(".json") or name in small)
    ]
    texts = checkpoint.source.read_stored(wanted) if wanted else []
    for extent, data in zip(wanted, texts, strict=True):
        why = ""
        if data.startswith(LFS_POINTER):
            from ftckpt.storage.state_files import never_fetched

            yield from_error(never_fetched(extent.file, data))
            continue
        if not extent.file.endswith(".json"):
            continue
        if not data.strip(b"\0 \t\r\n"):
            why = "holds nothing but zeros" if data else "is empty"
        elif extent.length < _MOST_JSON:
            try:
                json.loads(data, parse_int=str)  # Python makes no number of 4301 digits
            except RecursionError:
                pass  # JSON all the same
            except ValueError as error:
                at = f" from character {error.pos} on" if hasattr(error, "pos") else ""
                why = f"is not JSON{at}"
        if why:
            yield finding("bad-index", f"{extent.file} {why}", file=extent.file)


def _check_strays(
    checkpoint: Checkpoint, members: set[str], reported: set[str | None]
) -> Iterator[Finding]:
    """Yield files that belong to nothing; the format may know more about some.

    What may hold tensors was not read. Steps below a checkpoint are checkpoints of their own.
    """
    strays = [
        n
        for n in checkpoint.source.entries
        if n not in members
        and n not in reported
        and n not in checkpoint.second_copies
        and n not in VOUCHERS
        and not is_own(n)
    ]
    exported = exports_beside(checkpoint)
    yield from _check_exports(strays, exported)
    strays = [n for n in strays if n not in exported]
    unread = [n for n in strays if _may_be_part(checkpoint, n)]
    for name in unread[:_STRAYS_NAMED]:
        what = f"{name} may hold tensors, and is of no part that was read"
        yield finding("unknown-part", what, file=name)
    if len(unread) > _STRAYS_NAMED:
        more = len(unread) - _STRAYS_NAMED
        what = f"{more} more files may hold tensors, and are of no part that was read"
        yield finding("unknown-part", what)
    yield from _check_texts(checkpoint, strays)
    strays = sorted(set(strays) - set(unread))
    for name in strays[:_STRAYS_NAMED]:
        left = " (left by a write that was killed)" if is_leftover(name) else ""
        yield finding("stray-file", f"{name} is part of nothing here{left}", file=name)
    if len(strays) > _STRAYS_NAMED:
        more = len(strays) - _STRAYS_NAMED
        yield finding("stray-file", f"{more} more files are part of nothing here")


def exports_beside(checkpoint: Checkpoint) -> frozenset[str]:
    """Return the files of exports for other programs: weights that are here a second time."""
    found = frozenset(filter(is_exported, checkpoint.source.entries))
    if not found or not any(info.kind is Kind.PARAM for info in checkpoint.tensors.values()):
        return frozenset()
    return found.difference(checkpoint.members())


def _check_exports(strays: Iterable[str], exported: Collection[str]) -> Iterator[Finding]:
    """Yield what was not read, because it is the weights a second time: no verdict is about it."""
    places = Count(_export_of(name) for name in strays if name in exported)
    for place, count in list(places.items())[:_STRAYS_NAMED]:
        held = "" if place in exported else f" ({counted(count, 'file')})"
        what = f"{place} is an export{held}, and was not read: ftckpt verify checks it by its path"
        yield finding("stray-file", what, file=place)


def _export_of(name: str) -> str:
    """Return the outermost folder of a file that is an export, else the file."""
    folders = name.split("/")[:-1]
    ups = ("/".join(folders[: at + 1]) for at in range(len(folders)))
    return next((up for up in ups if is_exported(f"{up}/x")), name)


def _check_texts(checkpoint: Checkpoint, strays: Iterable[str]) -> Iterator[Finding]:
    """Yield JSON files of a trainer's state, which no format reads, of which the end is not there.

    Steps below a checkpoint are checkpoints of their own.
    """
    entries = checkpoint.source.entries
    texts = [
        Extent(name, 0, entries[name].size)
        for name in strays
        if name.endswith(".json")
        and is_text_of_state(name)
        and entries[name].kind is EntryKind.FILE
        and 0 < entries[name].size < _MOST_JSON
        and not any(step_in_name(folder) is not None for folder in name.split("/")[:-1])
    ][:_MOST_SMALL]
    for extent, raw in zip(texts, checkpoint.source.read_stored(texts), strict=True):
        if is_cut(raw):
            what = f"{extent.file} is cut: its JSON does not end"
            yield finding("bad-index", what, file=extent.file)


def _may_be_part(checkpoint: Checkpoint, name: str) -> bool:
    folders = name.split("/")[:-1]
    if is_leftover(name) or any(f.startswith(".") or step_in_name(f) is not None for f in folders):
        return False
    return may_hold_tensors(name) and checkpoint.source.entries[name].size > 0


def _check_tensors(
    checkpoint: Checkpoint, counter: Counter, reported: set[tuple[str, str | None]]
) -> Iterator[Finding]:
    """Check the coverage of every tensor, and every extent against its file."""
    counter.start("tensors", len(checkpoint.tensors), "tensors")
    entries = checkpoint.source.entries
    beyond: dict[str, list[tuple[str, Piece]]] = defaultdict(list)
    for key, info in checkpoint.tensors.items():
        counter.add(1)
        try:
            pieces = list(info.pieces)
            yield from _check_coverage(key, info, pieces)
            for piece in pieces:
                entry = entries.get(piece.extent.file)
                if entry is None or piece.extent.end > entry.size:
                    beyond[piece.extent.file].append((key, piece))
                yield from _check_length(key, info, piece)
        except FtckptError as error:
            yield from_error(error, tensor=key)
    for file, held in beyond.items():
        entry = entries.get(file)
        kind = "missing-file" if entry is None else "truncated-file"
        if (kind, file) not in reported:
            yield _cut_short(file, None if entry is None else entry.size, held)


def _check_coverage(key: str, info: TensorInfo, pieces: list[Piece]) -> Iterator[Finding]:
    for gap in check_coverage(info.shape, pieces):
        piece = None if gap.piece is None else pieces[gap.piece]
        yield finding(
            gap.kind,
            f"{key}: {gap.message}",
            tensor=key,
            file=None if piece is None else piece.extent.file,
            rank=None if piece is None else piece.rank,
        )


def _check_length(key: str, info: TensorInfo, piece: Piece) -> Iterator[Finding]:
    """Check that a raw dense piece has exactly the bytes of its elements."""
    elements = piece.box.volume if piece.flat is None else piece.flat[1] - piece.flat[0]
    needed = info.dtype.nbytes(elements)
    if not piece.packed and piece.strides is None and needed != piece.extent.length:
        yield finding(
            "size-mismatch",
            f"{key} needs {needed} bytes and has {piece.extent.length}",
            file=piece.extent.file,
            tensor=key,
            rank=piece.rank,
            offset=piece.extent.offset,
            length=piece.extent.length,
        )


def _cut_short(file: str, size: int | None, held: list[tuple[str, Piece]]) -> Finding:
    """Return one finding per file, however many tensors it cuts off."""
    key, first = min(held, key=lambda pair: pair[1].extent.offset)
    more = f" and {len(held) - 1} more" if len(held) > 1 else ""
    if size is None:
        return finding(
            "missing-file", f"{file} is missing, with {key}{more}", file=file, rank=first.rank
        )
    end = max(piece.extent.end for _, piece in held)
    return finding(
        "truncated-file",
        f"{file} ends at byte {size} of {end}: {key}{more} cut off",
        file=file,
        tensor=key,
        rank=first.rank,
        offset=size,
        length=end - size,
    )


def _check_steps(checkpoint: Checkpoint, apart: Iterable[str]) -> Iterator[Finding]:
    """Yield what counters say of the save; `apart` are warnings of clocks that differ.

    What such a warning says of a file is not said again.
    """
    files = [n for n in checkpoint.members() if _DATA.search(n)]
    holding = [n for n in files if (e := checkpoint.source.entries.get(n)) and e.size]
    said = {word for message in apart for word in re.split(_WORDS, message)}
    name, step = checkpoint.source.name, checkpoint.step
    known = step is not None or step_in_name(name) is not None
    for found in mixed_steps(checkpoint.step_scalars, holding):
        if found.kind == "step-unknown" and known:
            continue  # `inspect` says the step, and most files of a save keep no counter
        if found.kind != "step-disagrees" or found.file not in said:
            yield found
    if step is not None and says_other_step(name, step):
        what = f"the name {name} says step {step_in_name(name)}, the content says {step}"
        yield finding("step-name", what)


class Seal:
    """The manifest for a check: read once, and concurrently with other reads.

    `given` replaces the one beside the data; `use` says whether one beside the data counts.
    """

    def __init__(self, source: Source, given: Manifest | None = None, *, use: bool = True) -> None:
        self._source = source
        self._manifest = given
        self._error: FtckptError | None = None
        self._is_known = given is not None or not use
        self._reading: Future[Manifest | None] | None = None

    def begin(self) -> None:
        """Start reading it if a request takes a while; `manifest` waits for it."""
        traits = self._source.store.traits
        if not self._is_known and not traits.local and traits.parallel > 1:
            from ftckpt.workers.threads import DaemonThreads

            with suppress(NoResourceError):  # then it is read on demand
                thread = DaemonThreads(1)
                self._reading = thread.submit(find, self._source)
                thread.shutdown(wait=False)

    def manifest(self) -> Manifest | None:
        """Return it; None without one.

        Raises:
            FtckptError: it could not be read or parsed; again at each call.
        """
        if not self._is_known:
            try:
                self._manifest = self._read()
            except FtckptError as error:
                self._error = error
            self._is_known = True
        if self._error is not None:
            raise self._error
        return self._manifest

    def _read(self) -> Manifest | None:
        if self._reading is None:
            return find(self._source)
        while not self._reading.done():
            with suppress(TimeoutError):
                self._reading.result(_TICK)
        return self._reading.result()


def check_listing(checkpoint: Checkpoint, seal: Seal) -> Iterator[Finding]:
    """Yield differences of the files' names and sizes from the manifest, if there is one.

    Raises:
        UnavailableError: the storage does not answer.
    """
    found: list[Finding] = []
    try:
        manifest = seal.manifest()
    except FtckptError as error:
        yield from_error(error)
        return
    if manifest is not None:
        from .blocks import compare_listing

        source = checkpoint.source
        compare_listing(source, manifest, checkpoint.members(), Report(source, found.append))
    yield from found


def check_age(checkpoint: Checkpoint, seal: Seal, found: Iterable[Finding]) -> Iterator[Finding]:
    """Report that files with the findings `found` are newer than the manifest.

    Damage changes no times; a trainer that saves the step again does, and so does a copy. This
    explains a verdict and is not one itself.
    """
    try:
        manifest = seal.manifest()
    except FtckptError:  # reported already
        return
    written = _seconds(manifest.created) if manifest is not None else None
    if manifest is None or written is None:
        return
    differing = sorted({f.file for f in found if f.kind in _DIFFERS and f.file is not None})
    entries = [checkpoint.source.entries.get(checkpoint.source.stored(n)) for n in differing]
    newer = [
        name
        for name, entry in zip(differing, entries, strict=True)
        if entry is not None and entry.mtime is not None and entry.mtime > written
    ]
    if newer:
        yield finding(
            "older-manifest",
            f"the manifest of {manifest.created} is older than {listed(newer)}: it may describe"
            " an earlier save",
        )


def _seconds(created: str) -> float | None:
    """Return the end of the second of a manifest's time; None if it is invalid."""
    try:
        moment = datetime.strptime(created, "%Y-%m-%dT%H:%M:%SZ")
    except ValueError:
        return None
    return moment.replace(tzinfo=UTC).timestamp() + 1
