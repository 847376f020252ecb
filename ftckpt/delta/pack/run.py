"""Pack a checkpoint as what it adds to another one, or compress it whole; proven, then shown.

What is moved here is like what `ftckpt.transfer` moves, and goes by the same rules: built in a
staging place, read back and compared, shown by one last act. But the sizes of the files are known
only afterwards, so nothing is laid out before: data files are filled to their end, one a thread.

Pack a checkpoint by several machines: each fills data files, and proves what others filled.

A file belongs to one part, and so do the objects. The parts that share a tensor choose each for
themselves how it is stored; where two chose otherwise, who finishes encodes a file anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ftckpt.checkpoint import Checkpoint, TensorInfo
from ftckpt.checkpoint.read_ahead import reading_ahead
from ftckpt.delta.codec.choose_encoding import BlockChoice, EncodingPlan, Form, Reference
from ftckpt.delta.codec.fit_predictor import Fit
from ftckpt.delta.codec.planes import Coder, Planes
from ftckpt.delta.codec.predict import rule_named
from ftckpt.delta.index import NAME
from ftckpt.delta.index.objects import RecordFile, record_digests
from ftckpt.discovery.recognise import Format
from ftckpt.errors import CorruptError, IncompleteError, NotFoundError
from ftckpt.manifest.locate import thinned_from
from ftckpt.storage import StoreOptions, open_store
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import Layout, Literal, OutputFile
from ftckpt.transfer.places import absolute, require_apart_from_all, require_outside
from ftckpt.transfer.prove.against_source import Proof, SameObjects, prove
from ftckpt.transfer.prove.source_sums import SourceSums
from ftckpt.transfer.request import example as changes
from ftckpt.transfer.run import (
    MisreadError,
    forgetting_failures,
    manifest_of,
    require_sound,
    staging_at,
)
from ftckpt.transfer.staging import Staging
from ftckpt.transfer.staging.lock import marks_of
from ftckpt.transfer.write.blocks import BlockMade
from ftckpt.transfer.write.files import build, commit_bytes, digest_of_bytes
from ftckpt.verification.seen import SeenBytes
from ftckpt.workers import Division, Work

from .assemble import Packable, Packing, PackOptions
from .build import PackedFile, build_files, built_before
from .report import PackedShare, PackReport, shares


def pack(
    target: Packable,
    base: Packable | None,
    destination: str,
    records: RecordFile,
    result: Format,
    *,
    same_objects: SameObjects,
    options: PackOptions,
    store_options: StoreOptions,
    parts: PackedByParts | None = None,
) -> PackReport:
    """Write a checkpoint as a delta of `base`, prove it, and make it visible at `destination`.

    Killed at any instant the destination is absent or whole, the sources are untouched, and the
    same call goes on where it was.

    Args:
        target: what is packed; of any format and topology.
        base: what it is packed against, of any other; None packs it whole.
        destination: a local path or a URL that does not exist yet.
        records: the target's non-tensor state.
        result: the format `delta`, which reads the result back with this base.
        same_objects: how objects are compared.
        options: how.
        store_options: how to reach object stores.
        parts: what others have built there and proven.

    Raises:
        ExistsError: something stands at the destination.
        RefusedError: another run is writing there, or it lies inside a sealed checkpoint or a
            source.
        CorruptError: a source is damaged, or the proof failed.
        FtckptError: what a check found, by its exit code.
        IncompleteError: a source changed meanwhile.
        UnsupportedError: the index would be larger than a reader accepts.
        NoResourceError, DeniedError, UnavailableError: the place could not be written.
        NotFoundError: it is written, and the base has gone meanwhile.
    """

    def carry_out(options: PackOptions, *, once: bool) -> PackReport:
        return _carry_out(
            target, base, destination, records, result, same_objects=same_objects, options=options,
            store_options=store_options, parts=parts, once=once,
        )  # fmt: skip

    sides = [one.checkpoint for one in (target, base) if one is not None]
    try:
        return carry_out(options, once=options.proof and parts is None)
    except MisreadError:
        # Read wrongly once and rightly then: what was encoded of it is wrong.
        return carry_out(replace(options, restart=True), once=False)
    except CorruptError:
        if parts is not None or not any(one.decoding.proves_reads for one in sides):
            raise
        # The checks read all of it and name what is damaged, or it was read wrongly once.
        return carry_out(replace(options, restart=True), once=False)


def _carry_out(
    target: Packable,
    base: Packable | None,
    destination: str,
    records: RecordFile,
    result: Format,
    *,
    same_objects: SameObjects,
    options: PackOptions,
    store_options: StoreOptions,
    parts: PackedByParts | None,
    once: bool,
) -> PackReport:
    """Do what `pack` says; `once`: what is read for the encoding serves the checks too.

    Raises:
        MisreadError: a source was read wrongly, and is whole.
    """
    started, work = time.monotonic(), options.work
    with packed_at(target, base, destination, options, store_options) as begun:
        sources, staging, url, packing = begun
        files = (
            [part.path for part in packing.parts] + [file.path for file in records.files] + [NAME]
        )
        plan = packing.fingerprint(url, records)
        where = None if base is None else base.checkpoint.source.url
        if staging.begin(plan, dict.fromkeys(files, 0), restart=options.restart):
            return PackReport(destination, where, already_there=True)
        if parts is not None:
            staging.believe(parts.blocks, parts.place)
            packing.believe(parts.base_digests)
        with blaming(sources):
            content = Content.of(target.checkpoint)
            checks = SourceChecks([target] if base is None else [target, base], once=once)
            checks.begin()
            checked = time.monotonic()
            with ExitStack() as reading:
                for source in sources:
                    ahead = reading_ahead(source, limiter=work.limiter, jobs=work.threads)
                    reading.enter_context(ahead)
                plans = packing.plans({} if parts is None else parts.plans)
                staging.require_room(packing.estimate(plans) + records.nbytes)
                with checks.watching(packing, content) as seen:
                    built = build_files(packing.parts, packing.encoder, plans, staging, work, seen)
                small = build(Layout(files=records.files), packing.gatherer, staging)
                held = record_digests(records, packing.gatherer)
                name = None if base is None else packing.base_name(base, built, url)
            index = packing.index(plans, built, records, held, name)
        encoded = time.monotonic()
        with blaming(sources), forgetting_failures(staging):
            checks.end()
        held_back = time.monotonic() - encoded
        commit = commit_bytes([OutputFile(NAME, [Literal(index.dump())])])
        opened = result.open(staging.source(commit))
        proof: Proof | None = None
        if options.proof:
            known = None if parts is None else parts.known
            with blaming(sources), forgetting_failures(staging):
                how = replace(work, division=known)
                proof = prove(content, opened, same_objects, how, checks.sums)
        for source in sources:
            changes.require_unchanged(source.source, source.members())
        digests = [*built.digests, *small.digests]
        digests += [digest_of_bytes(path, data) for path, data in commit.items()]
        manifest = replace(
            manifest_of(opened, digests, proven=proof is not None),
            thinned=thinned_from(target.checkpoint.source),
        )
        staging.publish(commit, manifest.dump())
        if base is not None:
            _require_base(base.checkpoint, destination)
        bytes_in = sum(info.nbytes for info in packing.tensors) + records.bytes_in
        bytes_out = sum(file.size for file in manifest.files)
        components, methods = shares(index)
        if records.entries:
            components["objects"] = PackedShare.of(records.bytes_in, records.nbytes)
        return PackReport(
            destination,
            where,
            tensors=len(index.tensors),
            objects=len(target.checkpoint.objects),
            files=len(manifest.files),
            bytes_in=bytes_in,
            bytes_out=bytes_out,
            ratio=bytes_in / bytes_out,
            components=components,
            methods=methods,
            index_bytes=len(commit[NAME]),
            content=index.content(),
            taken_over=built.taken_over + small.taken_over,
            proof=proof,
            extra_read=checks.extra_read + (proof.source_bytes if proof is not None else 0),
            seconds={
                "check": checked - started + held_back,
                "encode": encoded - checked,
                "prove": time.monotonic() - encoded - held_back,
            },
            manifest=manifest,
        )


class SourceChecks:
    """Checks the sources of a delta: their structure first, and the content by what is read of it.

    Args:
        sides: target and base.
        once: whether what is read for the encoding serves the checks.

    Attributes:
        extra_read: bytes that the checks have read themselves.
        sums: by place, of what was read of the target; None where it was not all read here.
    """

    def __init__(self, sides: Sequence[Packable], *, once: bool) -> None:
        self.extra_read = 0
        self.sums: SourceSums | None = None
        self._once = once
        self._sides = sides
        self._seen = [self._seen_of(one) if once else None for one in sides]

    @staticmethod
    def _seen_of(side: Packable) -> SeenBytes | None:
        source = side.checkpoint
        read = side.check is not None and (source.is_plain or source.decoding.proves_reads)
        return SeenBytes(source) if read else None

    def begin(self) -> None:
        """Check what is not read on the way.

        Raises:
            FtckptError: a source has not passed.
        """
        for side, seen in zip(self._sides, self._seen, strict=True):
            if side.check is not None:
                found = side.check(seen)
                require_sound(found)
                self.extra_read += found.bytes_read

    @contextmanager
    def watching(
        self, packing: Packing, content: Content
    ) -> Iterator[Sequence[SeenBytes | SourceSums]]:
        """See what is read for the encoding, which the block does."""
        told: list[SeenBytes | SourceSums | None] = list(self._seen)
        if self._once and content.checkpoint.is_plain:
            told[0] = self.sums = SourceSums(content, self._seen[0])
        for one in told:
            if one is not None:
                one.begin()
        packing.tell(*told, *[None] * (2 - len(told)))
        yield [one for one in told if one is not None]
        packing.tell(None, None)
        for one in told:
            if one is not None:
                one.end()

    def end(self) -> None:
        """Check the content, where that was not done.

        Raises:
            FtckptError: a source has not passed.
            MisreadError: it has, and other bytes were read of it for the encoding.
        """
        for side, seen in zip(self._sides, self._seen, strict=True):
            if seen is None or side.check is None:
                continue
            found = side.check(seen)
            require_sound(found)
            self.extra_read += found.bytes_read - seen.taken
            if seen.differing:
                raise MisreadError(f"{seen.differing[0]} was read wrongly once")


def _require_base(base: Checkpoint, destination: str) -> None:
    """Look for the base once the delta can be seen; gc looks for deltas once it has dropped a base.

    So one of the two finds the other.

    Raises:
        NotFoundError: it is not what it was.
    """
    try:
        changes.require_unchanged(base.source, base.members())
    except (IncompleteError, NotFoundError) as error:
        raise NotFoundError(
            f"{destination} is written, and what it is packed against has gone: {error.message}",
            hint="ftckpt gc undelete ROOT lists what can be had back; or pack it again, whole",
            kind="missing-base",
        ) from error


@dataclass(frozen=True)
class PackedByParts:
    """What parts have built in a staging place.

    Attributes:
        blocks: of files.
        place: what the place is called.
        plans: how tensors are stored, by their places in the list of pairs.
        base_digests: of tensors of the base that nothing is packed against.
        known: knows what parts have proven.
    """

    blocks: Sequence[BlockMade]
    place: str
    plans: Mapping[int, EncodingPlan]
    base_digests: Mapping[str, str]
    known: Division | None = None


class PackPlace(NamedTuple):
    """A checkpoint that is about to be packed, and where.

    Attributes:
        sources: target and base.
        staging: where the delta is built.
        url: where it goes.
        packing: what makes it.
    """

    sources: Sequence[Checkpoint]
    staging: Staging
    url: str
    packing: Packing


@contextmanager
def packed_at(
    target: Packable,
    base: Packable | None,
    destination: str,
    options: PackOptions,
    store_options: StoreOptions,
) -> Iterator[PackPlace]:
    """Find the place of a delta, and pair target and base; the arguments are those of `pack`."""
    sources = [target.checkpoint] + ([base.checkpoint] if base is not None else [])
    store = open_store(destination, store_options)
    for source in sources:
        require_apart_from_all(source, store)
    require_outside(store)
    staging = staging_at(store, destination, store_options, single=False)
    url = absolute(store) if store.traits.local else store.url.rstrip("/")
    with ExitStack() as closing:
        closing.callback(staging.close)
        packing = Packing(target, base, options)
        closing.callback(packing.close)
        yield PackPlace(sources, staging, url, packing)


@contextmanager
def blaming(sources: Sequence[Checkpoint]) -> Iterator[None]:
    """Say of a failure that a source is still being written, where one has changed meanwhile."""
    with ExitStack() as stack:
        for source in sources:
            stack.enter_context(changes.blamed(source.source, source.members()))
        yield


@dataclass(frozen=True)
class ShareMade:
    """What one part has made of a delta.

    Attributes:
        blocks: of its files.
        plans: how their tensors are stored, by their places in the list of pairs.
        base_digests: of tensors of the base that nothing is packed against.
        nbytes: of its files.
        place: what the staging place is called.
    """

    blocks: Sequence[BlockMade]
    plans: Mapping[int, EncodingPlan]
    base_digests: Mapping[str, str]
    nbytes: int
    place: str


@dataclass(frozen=True)
class PackShare:
    """The files of a delta that one part fills.

    Attributes:
        part: which, in a word.
        takes: says whether a data file is its, of all of them.
        reads: says whether it reads a tensor of the base that nothing is packed against.
        objects: whether it writes the objects.
        check: verifies a share of the sources first.
        needed: asked when no other process can do the same part: whether there is something to do.
        keep: told of what was made, while no other process can do the same.
    """

    part: str
    takes: Callable[[Sequence[PackedFile], PackedFile], bool]
    reads: Callable[[Sequence[TensorInfo], TensorInfo], bool]
    objects: bool
    check: Callable[[], object]
    needed: Callable[[], bool]
    keep: Callable[[ShareMade], None]


def pack_share(
    target: Packable,
    base: Packable | None,
    destination: str,
    records: RecordFile,
    *,
    options: PackOptions,
    store_options: StoreOptions,
    share: PackShare,
) -> None:
    """Fill some data files of a delta beside other parts; nothing becomes visible.

    The arguments are as in `ftckpt.delta.pack.run.pack`; `share` says which files.

    Raises:
        FtckptError: see `ftckpt.delta.pack.run.pack`.
    """
    work = options.work
    with packed_at(target, base, destination, options, store_options) as begun:
        sources, staging, url, packing = begun
        files = [*(part.path for part in packing.parts), *(f.path for f in records.files), NAME]
        plan = packing.fingerprint(url, records)
        place = staging.join(plan, dict.fromkeys(files, 0), share.part)
        if not share.needed():
            return
        with blaming(sources), ExitStack() as reading:
            share.check()
            for source in sources:
                ahead = reading_ahead(source, limiter=work.limiter, jobs=work.threads)
                reading.enter_context(ahead)
            mine = [part for part in packing.parts if share.takes(packing.parts, part)]
            plans = packing.plans_of(sorted({n for part in mine for n, _ in part.blocks}))
            built = build_files(mine, packing.encoder, plans, staging, work)
            blocks, nbytes = list(built.blocks), sum(file.size for file in built.files)
            if share.objects:
                small = build(Layout(files=records.files), packing.gatherer, staging)
                blocks += small.blocks
                nbytes += records.nbytes
            rest = packing.unpaired()
            digests = packing.digests_of([one for one in rest if share.reads(rest, one)])
        for source in sources:
            changes.require_unchanged(source.source, source.members())
        share.keep(ShareMade(blocks, plans, digests, nbytes, place))


def prove_packed_share(
    target: Packable,
    base: Packable | None,
    destination: str,
    records: RecordFile,
    result: Format,
    *,
    same_objects: SameObjects,
    options: PackOptions,
    store_options: StoreOptions,
    parts: PackedByParts,
    work: Work,
) -> Mapping[str, str] | None:
    """Prove a share of a delta that parts have built, as the division of `work` says.

    The other arguments are as in `ftckpt.delta.pack.run.pack`.

    Returns:
        Marks of the files, as they were before they were read (see `transfer.staging.marks`); None
        where parts chose otherwise for a tensor, and nothing can be proven before that is mended.

    Raises:
        CorruptError: it is not what was packed (`failed-proof`).
        FtckptError: it could not be read.
    """
    with packed_at(target, base, destination, options, store_options) as begun:
        sources, staging, url, packing = begun
        with blaming(sources):
            plans = packing.plans(parts.plans)
            built = built_before(packing.parts, packing.encoder, plans, parts.blocks)
            if built is None:
                return None
            packing.believe(parts.base_digests)
            held = record_digests(records, packing.gatherer)
            name = None if base is None else packing.base_name(base, built, url)
            index = packing.index(plans, built, records, held, name)
            commit = commit_bytes([OutputFile(NAME, [Literal(index.dump())])])
            made = staging.source(commit)
            paths = [*(part.path for part in packing.parts), *(file.path for file in records.files)]
            marks = marks_of(staging.built, paths)
            prove(Content.of(target.checkpoint), result.open(made), same_objects, work)
        return marks


def dump_plan(plan: EncodingPlan) -> Any:
    """Return how a tensor is stored in JSON's types."""
    reference, fit, (form, planes), bits = plan
    rule = None if fit is None else [fit.rule.name, [float(n).hex() for n in fit.coefficients]]
    coders = [coder.name for coder in planes.coders]
    tried = [planes.joined, sorted(planes.plain), coders]
    return [reference.name, rule, form.name, tried, float(bits).hex()]


def load_plan(value: Any) -> EncodingPlan:
    """Return how a tensor is stored from JSON's types.

    Raises:
        ValueError, TypeError, KeyError: it is not that.
    """
    reference, rule, form, (joined, plain, coders), bits = value
    fit = None
    if rule is not None:
        name, numbers = rule
        fit = Fit(rule_named(name), tuple(map(float.fromhex, numbers)))
    planes = Planes(int(joined), frozenset(map(int, plain)), tuple(Coder[c] for c in coders))
    choice = BlockChoice(Form[form], planes)
    return EncodingPlan(Reference[reference], fit, choice, float.fromhex(bits))
