"""Check the numbers: NaN, infinity, impossible moments, replicas that differ.

NaN or infinity is damage in a parameter, a master or a moment, and a note in a buffer, which is
often a mask. Files rarely say which tensor of a model is a buffer: the optimizer's state and the
name do, and if neither does it is a warning.

Everything is read once more, in blocks; replicas and masters are compared in slabs of both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

from ftckpt.checkpoint import Checkpoint, Kind
from ftckpt.checkpoint.quantised import QuantisedTensor, ScaleRule
from ftckpt.checkpoint.read_ahead import extents_of, reading_ahead
from ftckpt.errors import CorruptError, FtckptError
from ftckpt.findings import Finding, finding, from_error
from ftckpt.workers import Work

from .masters import MasterCast, check_files, check_master, check_replicas
from .numbers import KnownParameters, check_layers, check_numbers
from .scales import check_rng, check_scale


class NumbersOf(NamedTuple):
    """One tensor whose numbers are checked: a task of the engine."""

    tensor: str


class Numbers(NamedTuple):
    """What the numbers of one tensor showed.

    Attributes:
        tensor: its key.
        findings: its defects.
        cast: for each file that holds its weight, how it compares with its master.
        zero: whether every element is zero.
    """

    tensor: str
    findings: tuple[Finding, ...]
    cast: Mapping[str, MasterCast]
    zero: bool


def check_values(checkpoint: Checkpoint, work: Work) -> Iterator[Finding]:
    """Yield defects of the numbers; see the module's docstring.

    Raises:
        UnavailableError: the storage does not answer.
    """
    keys = [key for key in checkpoint.tensors if key not in checkpoint.aliases]
    division = work.division
    if division is not None:
        mine = {key for key in keys if division.takes(NumbersOf(key))}
        work.counter.start("values", sum(checkpoint.tensors[key].nbytes for key in mine))
        ahead = extents_of(checkpoint, mine)
    else:
        work.counter.start("values", sum(checkpoint.tensors[key].nbytes for key in keys))
        ahead = None
    trained = KnownParameters(checkpoint.tensors.values())
    quantised: Mapping[str, QuantisedTensor] = {}
    with suppress(CorruptError):  # it is a finding of the structure
        quantised = checkpoint.quantised
    rules = {key: rule for one in quantised.values() for key, rule in one.rules.items()}
    cast: dict[str, MasterCast] = defaultdict(MasterCast)

    def check(one: NumbersOf) -> Numbers:
        key = one.tensor
        seen: dict[str, MasterCast] = defaultdict(MasterCast)
        zero: set[str] = set()
        found = list(_check_tensor(checkpoint, key, trained, rules.get(key), seen, zero, work))
        return Numbers(key, tuple(found), dict(seen), bool(zero))

    zeros: set[str] = set()

    with reading_ahead(checkpoint, ahead, limiter=work.limiter):
        for done in work.each(map(NumbersOf, keys), check):
            yield from done.findings
            if done.zero:
                zeros.add(done.tensor)
            for file, one in done.cast.items():
                cast[file].add(one)
        if work.partial:
            return  # what follows needs the whole
        yield from check_files(checkpoint, cast)
        begun = checkpoint.zero_at_first
        if begun and zeros.issuperset(begun):
            first = next(iter(begun))
            what = f"{first} and the {len(begun) - 1} others that begin as zeros are zero still"
            yield finding("untrained", f"{what}: the adapter changes nothing", tensor=first)
        yield from check_layers(checkpoint.tensors, zeros)
        yield from check_rng(checkpoint)


def _check_tensor(
    checkpoint: Checkpoint,
    key: str,
    trained: KnownParameters,
    rule: ScaleRule | None,
    cast: Mapping[str, MasterCast],
    zeros: set[str],
    work: Work,
) -> Iterator[Finding]:
    info = checkpoint.tensors[key]
    try:
        yield from check_numbers(checkpoint, key, info, trained.kind(info), work, zeros)
        if rule is not None:
            yield from check_scale(checkpoint, info, rule, work.limiter)
        yield from check_replicas(checkpoint, key, info, work.limiter)
        if info.kind is Kind.MASTER:
            yield from check_master(checkpoint, key, info, cast, work.limiter)
    except FtckptError as error:
        yield from_error(error, tensor=key)
