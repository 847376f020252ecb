"""Group rank files into sets, and check whether a set is complete.

The number of ranks is what the names say (`_of_8`), a record beside the files, what the files
themselves record, or the meshes of their tensors. Where none of these says it, the highest number
in a name implies one, and a finding says that it is only implied.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from ftckpt.findings import Finding, finding, listed

from .names import RankFile
from .recorded_job import Contradiction, Evidence

if TYPE_CHECKING:
    from .parse_files import RecordedConfig

# A set that lacks more ranks than this is told in one sentence.
SHOWN = 64


class Size(NamedTuple):
    """How many files a set has.

    Attributes:
        files: one for each rank, or pipeline stage.
        known_by: what says so, in words; "" where the highest number in a name implies it.
    """

    files: int
    known_by: str


def size_of(
    files: Sequence[RankFile], beside: RecordedConfig, evidence: Sequence[Evidence]
) -> Size:
    """Return how many files a set has, by the strongest evidence there is."""
    named = Counter(f.world_size for f in files if f.world_size is not None)
    recorded = beside.world_size
    if named:
        if recorded in named:
            return Size(recorded or 0, beside.path)
        most = max(named.items(), key=lambda item: (item[1], item[0]))[0]
        return Size(most, "the files' names")
    if recorded is not None:
        return Size(recorded, beside.path)
    highest = 1 + max((f.rank for f in files), default=-1)
    staged = any(f.staged for f in files)
    inside = [told for e in evidence if (told := recorded_by(e, highest, staged=staged))]
    if inside:
        votes = Counter(told.files for told in inside)
        most = max(votes.items(), key=lambda item: (item[1], item[0]))[0]
        return Size(most, next(told.known_by for told in inside if told.files == most))
    least = max((e.least for e in evidence), default=0)
    if least >= highest and not staged:
        return Size(least, "the meshes of its tensors")
    return Size(highest, "")


def recorded_by(evidence: Evidence, highest: int, *, staged: bool) -> Size | None:
    """Return how many files one file says that there are; None where it does not say it.

    Args:
        evidence: what the file records.
        highest: the highest number in a name, and one.
        staged: whether the files are of pipeline stages.
    """
    spelled, groups = evidence.spelled, evidence.groups
    if evidence.shards is not None:
        return Size(evidence.shards, spelled["shards"])
    if staged:
        if "pp" in groups:
            return Size(groups["pp"], spelled["pp"])
        # Ranks that share a stage have one file, so a world is a multiple of its stages.
        world = evidence.world
        odd = world is not None and (world < highest or world % highest != 0)
        return Size(world, spelled["world"]) if world is not None and odd else None
    model = _product(groups, ("tp", "pp", "cp"))
    every = _product(groups, ("tp", "pp", "cp", "dp"))
    split = [axis for axis in ("tp", "pp", "cp") if axis in groups]
    if evidence.world is not None:
        # Of replicas one may save for all, if that is what the sizes of the groups amount to.
        alone = split and highest <= model < evidence.world and evidence.world % model == 0
        if alone and not _more_than_model(evidence, model):
            return Size(model, " x ".join(spelled[axis] for axis in split))
        return Size(evidence.world, spelled["world"])
    if not groups:
        return None
    if split and highest <= model:
        return Size(model, " x ".join(spelled[axis] for axis in split))
    return Size(every, " x ".join(spelled[axis] for axis in groups))


def _product(groups: dict[str, int], axes: Iterable[str]) -> int:
    found = 1
    for axis in axes:
        found *= groups.get(axis, 1)
    return found


def _more_than_model(evidence: Evidence, model: int) -> bool:
    """Whether a file shows that replicas save too: it is of one that is not the first."""
    return evidence.coordinates.get("dp", 0) > 0 or evidence.least > model


def check_set(
    files: Sequence[RankFile], size: Size, beside: RecordedConfig, evidence: Sequence[Evidence]
) -> Iterator[Finding]:
    """Yield what is wrong with a set: ranks missing, several worlds, records that disagree.

    Args:
        files: all rank files.
        size: see `size_of`.
        beside: what is recorded beside the files.
        evidence: what the files that could be read record.
    """
    yield from _check_names(files, size.files, beside)
    yield from _check_missing(files, size.files)
    yield from _check_worlds(files, size, evidence)
    yield from _check_contradictions(files, beside, evidence)
    yield from _check_ranks(files, size.files, evidence)
    yield from _check_steps(files, beside, evidence)
    if not size.known_by:
        unit = files[0].unit if files else "rank"
        yield finding(
            "count-unknown",
            f"nothing records how many {unit}s there are: {size.files} is what the highest"
            " number in a name implies",
        )


def _check_names(
    files: Sequence[RankFile], world: int, beside: RecordedConfig
) -> Iterator[Finding]:
    for file in files:
        if file.world_size not in (None, world):
            yield finding(
                "world-size",
                f"{file.path} is of {file.world_size} ranks, the others of {world}",
                file=file.path,
                rank=file.rank,
            )
        elif file.rank >= world:
            yield finding(
                "world-size",
                f"{file.path} is of {file.unit} {file.rank} in a world of {world}",
                file=file.path,
                rank=file.rank,
            )
    if beside.world_size is not None and beside.world_size != world:
        yield finding(
            "world-size",
            f"{beside.path} says {beside.world_size} ranks, the files are of {world}",
            file=beside.path,
        )


def _check_missing(files: Sequence[RankFile], world: int) -> Iterator[Finding]:
    mine = [f for f in files if f.world_size in (None, world) and f.rank < world]
    for role, series in dict.fromkeys((f.role, f.series) for f in mine):
        held = {f.rank: f for f in mine if (f.role, f.series) == (role, series)}
        example = next(iter(held.values()))
        absent = (rank for rank in range(world) if rank not in held)
        for rank in islice(absent, SHOWN):
            name = example.of_rank(rank)
            yield finding(
                "missing-rank",
                f"{name} is missing: {example.unit} {rank} of {world} has no {role} file",
                file=name,
                rank=rank,
            )
        more = world - len(held) - SHOWN
        if more > 0:
            yield finding("missing-rank", f"{more} more {example.unit}s have no {role} file")


def _check_worlds(
    files: Sequence[RankFile], size: Size, evidence: Sequence[Evidence]
) -> Iterator[Finding]:
    """Every file's own numbers must agree with the set's, and with the other files'."""
    highest = 1 + max((f.rank for f in files), default=-1)
    staged = any(f.staged for f in files)
    votes = Counter(_worlds(e) for e in evidence if _worlds(e))
    usual = max(votes.items(), key=lambda item: item[1])[0] if votes else ()
    for one in evidence:
        told = recorded_by(one, highest, staged=staged)
        if told is not None and told.files != size.files:
            of = f"{size.known_by or 'the others'} {_says(size.known_by)} {size.files}"
            what = f"{one.file} records {told.known_by} = {told.files}: {of}"
        elif one.least > size.files:
            what = (
                f"{one.file} has tensors of a mesh of {one.least}, the set has {size.files} ranks"
            )
        elif _worlds(one) and _worlds(one) != usual:
            first, second = set(_worlds(one)) - set(usual), set(usual) - set(_worlds(one))
            what = f"{one.file} records {_pairs(first)}, the others {_pairs(second)}"
        else:
            continue
        yield finding("world-size", what, file=one.file, rank=one.number)


def _check_contradictions(
    files: Sequence[RankFile], beside: RecordedConfig, evidence: Sequence[Evidence]
) -> Iterator[Finding]:
    """A file's numbers agree with each other, or contradict each other as its siblings' do.

    All files may carry one configuration of another job; the outermost number counts then, and a
    larger one means that there may have been more files.
    """
    series = {f.path: (f.role, f.series) for f in files}
    groups: dict[object, list[Evidence]] = defaultdict(list)
    for one in evidence:
        groups[series.get(one.file)].append(one)
    shared: dict[str, tuple[str, Contradiction]] = {}
    for torn in beside.torn:
        shared.setdefault(torn.what, (beside.path, torn))
    for group in groups.values():
        votes = Counter(frozenset(map(_form, one.torn)) for one in group)
        usual = max(votes.items(), key=lambda item: (item[1], not item[0]))[0]
        for one in group:
            for torn in one.torn:
                if _form(torn) not in usual:
                    kind = "wrong-rank" if torn.what.endswith("_rank") else "world-size"
                    what = f"{one.file} {torn}, and the other files do not"
                    yield finding(kind, what, file=one.file, rank=one.number)
                else:
                    shared.setdefault(torn.what, (one.file, torn))
    for what, (file, torn) in shared.items():
        if not what.endswith("_rank") and torn.value > torn.known:
            yield finding(
                "count-unknown",
                f"{file} {torn}: the first is what counts here, and by the second there were more"
                " files than these",
                file=file,
            )


def _form(torn: Contradiction) -> tuple[str, ...]:
    """Return what of a contradiction is alike in all files: a rank's own place is not."""
    values = () if torn.what.endswith("_rank") else (str(torn.known), str(torn.value))
    return (torn.what, torn.first, torn.second, *values)


def _says(known_by: str) -> str:
    return "say" if known_by in ("", "the files' names") else "says"


def _worlds(evidence: Evidence) -> tuple[tuple[str, int], ...]:
    counts = {"shards": evidence.shards, "world": evidence.world, **evidence.groups}
    return tuple((name, value) for name, value in counts.items() if value is not None)


def _pairs(pairs: Iterable[tuple[str, int]]) -> str:
    return listed([f"{name} = {value}" for name, value in sorted(pairs)]) or "nothing of that"


def _check_ranks(
    files: Sequence[RankFile], world: int, evidence: Sequence[Evidence]
) -> Iterator[Finding]:
    """The rank that a file records is the one in its name; no two files are of one rank."""
    staged = {f.path: f.staged for f in files}
    series = {f.path: (f.role, f.series) for f in files}
    seen: dict[tuple[object, ...], str] = {}
    for one in evidence:
        what, wrote = "rank", one.rank
        if staged.get(one.file):
            what, wrote = "pp_rank", one.coordinates.get("pp")
        elif one.world not in (None, world):
            # Only some of the world's ranks save, so a rank is not a number of a file.
            what, wrote = "", None
        if wrote is not None and wrote != one.number:
            message = (
                f"{one.file} records {one.spelled[what]} = {wrote}:"
                f" it is not the file of {'stage' if staged.get(one.file) else 'rank'} {one.number}"
            )
            yield finding("wrong-rank", message, file=one.file, rank=one.number)
            continue
        place = (one.rank, *sorted(one.coordinates.items()))
        if not _tells_files_apart(one, world):
            continue
        other = seen.setdefault((series.get(one.file), *place), one.file)
        if other != one.file:
            message = f"{one.file} and {other} are of one rank: they record the same place"
            yield finding("wrong-rank", message, file=one.file, rank=one.number)


def _tells_files_apart(one: Evidence, world: int) -> bool:
    """Whether a file's place is one that no other file of the set can have."""
    if one.rank is not None:
        return True
    axes = set(one.coordinates) & set(one.groups)
    return bool(axes) and _product(one.groups, axes) >= world


def _check_steps(
    files: Sequence[RankFile], beside: RecordedConfig, evidence: Sequence[Evidence]
) -> Iterator[Finding]:
    """All files are of one step: that of most of them, of the record beside them, of the name."""
    known = {e.file: e.step for e in evidence if e.step is not None}
    votes = Counter(known.values())
    if not votes:
        return
    said = {f.step for f in files if f.step is not None} | {beside.step}
    step = max(votes.items(), key=lambda item: (item[1], item[0] in said, item[0]))[0]
    for one in evidence:
        if one.step is not None and one.step != step:
            yield finding(
                "mixed-steps",
                f"{one.file} records {one.spelled['step']} = {one.step}, the other files say"
                f" {step}: it is of another save",
                file=one.file,
                rank=one.number,
            )
    if beside.step is not None and beside.step != step:
        yield finding(
            "mixed-steps",
            f"{beside.path} records step {beside.step}, the files say {step}",
            file=beside.path,
        )
    named = next((f for f in files if f.step is not None), None)
    if named is not None and named.step != step:
        what = f"{named.path} says step {named.step} by its name, the content says {step}"
        yield finding("step-name", what, file=named.path)
