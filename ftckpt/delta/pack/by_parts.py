"""Pack a checkpoint by several machines: each fills data files, and proves what others filled.

A file belongs to one part, and so do the objects. The parts that share a tensor choose each for
themselves how it is stored; where two chose otherwise, who finishes encodes a file anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from ftckpt.checkpoint import TensorInfo
from ftckpt.checkpoint.read_ahead import reading_ahead
from ftckpt.delta.codec.blocks import BlockChoice, Form, Reference
from ftckpt.delta.codec.choose_encoding import EncodingPlan
from ftckpt.delta.codec.entropy import Coder
from ftckpt.delta.codec.fit_predictor import Fit
from ftckpt.delta.codec.planes import Planes
from ftckpt.delta.codec.predict import rule_named
from ftckpt.delta.index import NAME
from ftckpt.delta.index.objects import RecordFile, record_digests
from ftckpt.discovery.recognise import Format
from ftckpt.storage import StoreOptions
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import Layout, Literal, OutputFile
from ftckpt.transfer.prove.against_source import SameObjects, prove
from ftckpt.transfer.request import source_changes as changes
from ftckpt.transfer.staging.marks import marks_of
from ftckpt.transfer.write.blocks import BlockMade
from ftckpt.transfer.write.files import build, commit_bytes
from ftckpt.workers import Work

from .assemble import Packable, PackOptions
from .build import build_files, built_before
from .partition import PackedFile
from .run import PackedByParts, blaming, packed_at


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
