"""Pair a target with its base, and build the index of the delta."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from ftckpt.checkpoint import Checkpoint, TensorInfo, Topology
from ftckpt.delta.codec.choose_encoding import EFFORTS, EncodingPlan
from ftckpt.delta.codec.encode import DeltaEncoder
from ftckpt.delta.codec.fit_predictor import FitSettings
from ftckpt.delta.codec.predict import DeltaSide
from ftckpt.delta.index import (
    ROW,
    BaseName,
    DataFile,
    DeltaIndex,
    DeltaObject,
    DeltaTensor,
    content_digest,
)
from ftckpt.delta.index.head import recorded_path
from ftckpt.delta.index.objects import RecordFile
from ftckpt.delta.index.part_record import ElementSums
from ftckpt.digests.tensors import TensorDigest, digest_tensor
from ftckpt.progress import Counter
from ftckpt.transfer.places import place_of
from ftckpt.transfer.read.elements import Gatherer
from ftckpt.verification import VerifyReport
from ftckpt.version import __version__
from ftckpt.workers import ALONE, Work

from .build import BuiltFiles, PackedFile, divide
from .pair import DeltaPair, Sampled, Task, family, matched, pair, sample
from .tensor_bytes import TensorBytes, own_tensors, tied

if TYPE_CHECKING:
    from ftckpt.transfer.read.source_bytes import ReadObserver
    from ftckpt.verification.seen import SeenBytes

Paths = Mapping[str, tuple[str | int, ...]]

_SAMPLED = 4  # tensors for which one task chooses


@dataclass(frozen=True, kw_only=True)
class Packable:
    """A checkpoint that is packed, or packed against.

    Attributes:
        checkpoint: opened.
        digests: its tensor digests by key, where all are known (it is a delta); else empty.
        manifest: the digest of its manifest; "" where it has none.
        paths: keys that lead to a tensor, by key, or to an object, by name, in the nested state
            that it was saved from, where it recorded them.
        check: verifies it by its own evidence, what was seen not again; None where nobody wants
            that.
    """

    checkpoint: Checkpoint
    digests: Mapping[str, str] = field(default_factory=dict)
    paths: tuple[Paths, Paths] = ({}, {})
    manifest: str = ""
    check: Callable[[SeenBytes | None], VerifyReport] | None = None


@dataclass(frozen=True, kw_only=True)
class PackOptions:
    """How a checkpoint is packed.

    Attributes:
        level: 1 fast, 2, 3 small.
        work: by how many threads or processes (threads wait for each other, the more the more
            there are); its counter is told of the elements' bytes packed and proven.
        proof: whether the result is read back and compared before it is visible.
        restart: forget what earlier runs have left at the destination, and build it anew.
        renamed: key in the target -> key in the base, where they differ.
        settings: of the optimizer, as far as known.
    """

    level: int = 2
    work: Work = ALONE
    proof: bool = True
    restart: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)
    settings: Callable[[DeltaPair], FitSettings] = lambda pair: FitSettings()


class _Side(NamedTuple):
    """One of the two checkpoints, as it is read."""

    packable: Packable
    bytes: TensorBytes


class Packing:
    """One checkpoint on its way into a delta: what it takes up to the index.

    Args:
        target: what is packed.
        base: what it is packed against; None packs it whole.
        options: how.

    Attributes:
        tensors: those that are packed; tied copies of others are not.
        encoder: encodes their blocks.
        parts: which blocks go into which data file.
        gatherer: reads the target's files.
    """

    def __init__(self, target: Packable, base: Packable | None, options: PackOptions) -> None:
        self._options = options
        self._work = options.work
        limiter = options.work.limiter
        self._target = _Side(target, TensorBytes(target.checkpoint, limiter))
        self._base = None if base is None else _Side(base, TensorBytes(base.checkpoint, limiter))
        self._known: Mapping[str, str] = {} if base is None else base.digests
        self._told: Mapping[str, str] = {}
        self.gatherer = Gatherer(target.checkpoint, limiter)
        self._tied = tied(target.checkpoint)
        self.tensors: Sequence[TensorInfo] = list(own_tensors(target.checkpoint).values())
        self._base_tensors = {} if base is None else dict(own_tensors(base.checkpoint))
        renamed = dict(options.renamed)
        if base is not None:  # a copy of another tensor there has no digest of its own
            for info in self.tensors:
                key = renamed.get(info.key, info.key)
                renamed[info.key] = tied(base.checkpoint).get(key, key)
        self._renamed = renamed
        pairs = self._matched(pair(self.tensors, self._base_tensors, renamed))
        unknown = [
            side
            for side, one in ((DeltaSide.TARGET, self._target), (DeltaSide.BASE, self._base))
            if one is not None and not one.packable.digests
        ]
        self.encoder = DeltaEncoder(
            pairs,
            self._target.bytes.fill,
            None if self._base is None else self._base.bytes.fill,
            options.settings,
            EFFORTS[options.level],
            unknown,
        )
        self.parts: Sequence[PackedFile] = divide(pairs)

    def _matched(self, pairs: list[DeltaPair]) -> list[DeltaPair]:
        """Find the moments of weights that go by numbers, where predictions are tried."""
        if self._base is None or not EFFORTS[self._options.level].predictions:
            return pairs
        target, base = self._target.bytes.fill, self._base.bytes.fill

        def one(task: Task, counter: Counter) -> Sampled:
            made = sample(pairs, task, target, base)
            counter.add(1)
            return made

        def sampled(tasks: Sequence[Task]) -> Iterator[Sampled]:
            self._work.counter.start("matching", len(tasks), "tensors")
            return self._work.spread(tasks, one)

        return matched(pairs, sampled)

    def tell(self, target: ReadObserver | None, base: ReadObserver | None) -> None:
        """Tell of what is read of the tensors of both from now on."""
        self._target.bytes.tell(target)
        if self._base is not None:
            self._base.bytes.tell(base)

    def close(self) -> None:
        """Close every file."""
        self.gatherer.close()
        self._target.bytes.close()
        if self._base is not None:
            self._base.bytes.close()

    def fingerprint(self, url: str, records: RecordFile) -> str:
        """Return a digest of all that decides the result's bytes."""
        import xxhash

        state = xxhash.xxh3_128(repr((url, self._options.level)).encode())
        for side in (self._target, self._base):
            if side is None:
                continue
            source = side.packable.checkpoint.source
            state.update(repr(place_of(source)).encode())
            for name in sorted(side.packable.checkpoint.members()):
                entry = source.entries.get(name)
                seen = None if entry is None else (entry.size, entry.mtime, entry.etag)
                state.update(repr((name, seen)).encode())
        for one in self.encoder.pairs:
            # Matched kin decide which file a tensor lies in; others follow from the keys.
            kin = () if one.kin == family(one.info) else (one.kin,)
            state.update(repr((one.info.key, one.base, *kin)).encode())
        state.update(repr(records.entries).encode())
        digest: str = state.hexdigest()
        return digest

    def plans(
        self, known: Mapping[int, EncodingPlan] = MappingProxyType({})
    ) -> Sequence[EncodingPlan]:
        """Choose how each tensor is stored.

        Args:
            known: what was chosen before, by place in the list of pairs.

        Raises:
            FtckptError: what reading the samples raises.
        """
        count = len(self.encoder.pairs)
        plans = {**known, **self.plans_of([n for n in range(count) if n not in known])}
        return [plans[number] for number in range(count)]

    def plans_of(self, numbers: Sequence[int]) -> Mapping[int, EncodingPlan]:
        """Choose how some tensors are stored, by their places in the list of pairs."""
        self._work.counter.start("sampling", len(numbers), "tensors")
        tasks = [numbers[at : at + _SAMPLED] for at in range(0, len(numbers), _SAMPLED)]
        plans: dict[int, EncodingPlan] = {}
        for chosen in self._work.spread(tasks, self._chosen):
            plans |= chosen
        return plans

    def _chosen(self, task: Sequence[int], counter: Counter) -> dict[int, EncodingPlan]:
        chosen = {number: self.encoder.plan(number) for number in task}
        counter.add(len(chosen))
        return chosen

    def estimate(self, plans: Sequence[EncodingPlan]) -> int:
        """Return about how many bytes the blocks will take, by the samples."""
        pairs = self.encoder.pairs
        bits = sum(p.bits * one.info.numel for p, one in zip(plans, pairs, strict=True))
        return int(min(bits / 8, sum(info.nbytes for info in self.tensors)))

    def base_name(self, base: Packable, built: BuiltFiles, url: str) -> BaseName:
        """Return how the delta names its base.

        Raises:
            FtckptError: a tensor of the base that nothing is packed against cannot be read.
        """
        source = base.checkpoint.source
        return BaseName(
            recorded_path(place_of(source), url),
            base.checkpoint.step,
            content_digest(self._base_digests(built)),
            base.manifest,
        )

    def index(
        self,
        plans: Sequence[EncodingPlan],
        built: BuiltFiles,
        records: RecordFile,
        held: Sequence[bytes],
        name: BaseName | None,
    ) -> DeltaIndex:
        """Return the index.

        Args:
            plans: how each tensor was stored.
            built: its blocks.
            records: the non-tensor state.
            held: the digest of each record.
            name: of the base.
        """
        checkpoint = self._target.packable.checkpoint
        base_digests = self._base_digests(built)
        tensors: list[DeltaTensor] = []
        for number, (one, chosen) in enumerate(zip(self.encoder.pairs, plans, strict=True)):
            digest = self._target.packable.digests.get(one.info.key) or self._digest(
                one.info, built.sums.get(number, (ElementSums(), ElementSums()))[0]
            )
            theirs = "" if one.base is None else base_digests[one.base]
            first = built.rows.first[number]
            tensors.append(self.encoder.tensor(number, chosen, first, digest, theirs))
        rows = built.rows.dump()
        copies, more = _copies(checkpoint, self._tied, tensors, rows)
        paths, others = self._target.packable.paths
        tensors = [
            replace(tensor, path=paths.get(tensor.key, ())) for tensor in [*tensors, *copies]
        ]
        files = [*built.files, *(DataFile(file.path, file.size) for file in records.files)]
        topology = checkpoint.topology
        return DeltaIndex(
            step=checkpoint.step,
            source_format=checkpoint.source_format,
            topology=Topology(
                topology.world_size, topology.tp, topology.pp, topology.dp, topology.ep
            ),
            base=name,
            files=files,
            tensors=tensors,
            objects=[
                DeltaObject(
                    e.name,
                    e.form,
                    e.rank,
                    len(built.files),
                    e.offset,
                    e.length,
                    digest,
                    others.get(e.name, ()),
                )
                for e, digest in zip(records.entries, held, strict=True)
            ],
            aliases=self._tied,
            rows=rows + more,
            tool=f"ftckpt {__version__}",
            created=_newest(checkpoint),
        )

    def _base_digests(self, built: BuiltFiles) -> Mapping[str, str]:
        """Return the tensor digests of the base, those computed that nobody knew."""
        if self._known or self._base is None:
            return self._known
        known: dict[str, str] = {}
        for number, one in enumerate(self.encoder.pairs):
            if one.base is not None:
                sums = built.sums.get(number, (ElementSums(), ElementSums()))[1]
                known[one.base] = self._digest(self._base_tensors[one.base], sums)
        rest = [info for info in self.unpaired() if info.key not in self._told]
        self._known = known | dict(self._told) | self.digests_of(rest)
        return self._known

    def unpaired(self) -> Sequence[TensorInfo]:
        """Return the tensors of the base that nothing is packed against, if it has no digests."""
        if self._known:
            return ()
        paired = {one.base for one in self.encoder.pairs}
        return [info for key, info in self._base_tensors.items() if key not in paired]

    def digests_of(self, tensors: Sequence[TensorInfo]) -> dict[str, str]:
        """Return the tensor digests of some tensors of the base, by key."""
        if self._base is None:
            return {}
        work, checkpoint = self._work, self._base.packable.checkpoint
        work.counter.start("digesting the rest of the base", sum(info.nbytes for info in tensors))

        def digest(info: TensorInfo, counter: Counter) -> tuple[str, str]:
            made = digest_tensor(checkpoint, info, work.limiter)
            counter.add(info.nbytes)
            return info.key, made

        return dict(work.spread(tensors, digest))

    def believe(self, digests: Mapping[str, str]) -> None:
        """Take digests of tensors of the base for known: others have read them."""
        self._told = dict(digests)

    @staticmethod
    def _digest(info: TensorInfo, sums: ElementSums) -> str:
        digest = TensorDigest(info.dtype, info.shape)
        digest.add(*sums)
        assert digest.complete, info.key
        return digest.hexdigest()


def _copies(
    checkpoint: Checkpoint,
    copies: Mapping[str, str],
    tensors: Sequence[DeltaTensor],
    rows: bytes,
) -> tuple[list[DeltaTensor], bytes]:
    """Return the entries of tied copies, and their rows: they share the payloads of the owners."""
    owners = {tensor.key: tensor for tensor in tensors}
    made, more = [], bytearray()
    listed = [key for key in checkpoint.tensors if key in copies]
    for key in [*listed, *(key for key in copies if key not in checkpoint.tensors)]:
        owner, info = owners[copies[key]], checkpoint.tensors.get(key)
        # A key is a prefix, which tied tensors have in common, and the name.
        name = key.removeprefix(owner.key.removesuffix(owner.name)) if info is None else info.name
        stored = "" if info is None else info.stored_name
        first = (len(rows) + len(more)) // ROW.size
        made.append(replace(owner, name=name, first=first, stored_name=stored))
        more += rows[owner.first * ROW.size :][: owner.blocks * ROW.size]
    return made, bytes(more)


def _newest(checkpoint: Checkpoint) -> str:
    """Return when the newest file was written: what is packed again gets equal bytes."""
    entries = checkpoint.source.entries
    times = [entries[name].mtime or 0 for name in checkpoint.members() if name in entries]
    newest = datetime.fromtimestamp(int(max(times, default=0)), UTC)
    return newest.strftime("%Y-%m-%dT%H:%M:%SZ")
