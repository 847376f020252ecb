"""Parse the files of a legacy Megatron checkpoint's ranks: whose they are, and what is missing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ftckpt.errors import (
    CorruptError,
    FtckptError,
    IncompleteError,
    NewerWriterError,
    UnsupportedError,
)
from ftckpt.findings import Finding, finding, from_error
from ftckpt.formats.megatron.names import directory_ranks, is_copy
from ftckpt.formats.torch_files.parse_files import opaque_notes, parse_files
from ftckpt.formats.torch_files.stream import TorchStream
from ftckpt.storage.source import Source

from .grid import OPTIMIZER, WEIGHTS, Arguments, Coordinate, MegatronGrid, grid_of
from .tensor_names import LocalTensor, local_tensors

# A checkpoint that lacks more files than this is told of the rest in one sentence.
_MISSING = 64
LAYER_WISE = "layer_wise_optimizer_{}.pt"
_MOST_DATA_RANKS = 4096


@dataclass
class Rank:
    """One directory, parsed."""

    number: int  # its place among the directories of a complete checkpoint
    at: Coordinate  # its coordinate
    stream: TorchStream  # its `model_optim_rng.pt`
    held: list[LocalTensor]  # the model's tensors in it, in the order of the model
    rest: dict[str, Any]  # what else stands among them, by chunk key
    distributed: TorchStream | None = None  # its `distrib_optim.pt`, where it has one
    # further torch.save files in it, such as `layer_wise_optimizer_0.pt`
    others: list[TorchStream] = field(default_factory=list)


@dataclass
class RankDirectories:
    """All directories."""

    grid: MegatronGrid  # sizes of the groups of ranks
    args: Arguments  # of the job
    # that could be read, first copies first: by stage, expert rank and tensor rank
    ranks: list[Rank]
    streams: dict[str, TorchStream]  # of every file that could be parsed, without its tree
    numbers: dict[str, int]  # by file: the number of its rank
    members: set[str]  # every file that belongs to the checkpoint
    found: list[Finding]  # what is wrong
    notes: list[Finding]  # what is worth knowing


def read_ranks(source: Source) -> RankDirectories:
    """Parse every rank's files.

    Raises:
        IncompleteError, CorruptError, UnsafeError, UnsupportedError: see `Megatron.open`.
    """
    directories = _directories(source)
    members = [p for p in source.entries if p.rpartition("/")[0] in directories]
    members = sorted(p for p in members if p.endswith(".pt") and not is_copy(p))
    found: list[Finding] = []
    parsed = _parsed(source, members, found)
    for copy in _copies(parsed):
        members.remove(copy)
        del parsed[copy]
    weights = {d: parsed[f"{d}/{WEIGHTS}"] for d in directories if f"{d}/{WEIGHTS}" in parsed}
    for directory, stream in weights.items():
        _require_version(f"{directory}/{WEIGHTS}", stream.tree)
    recorded = (Arguments(stream.tree.get("args")) for stream in weights.values())
    args = next((a for a in recorded if a.record is not None), Arguments())
    grid = grid_of(args, directories.values())
    found += _grid_findings(source, grid, directories, _files_of(members, weights))
    if any(stream.tree.get("optimizer") for stream in weights.values()):
        found += _layer_wise_findings(source, args, grid, directories)
    numbers = {at: n for n, at in enumerate(grid.directories())}
    places = {
        d: at for d, names in directories.items() if (at := grid.coordinate(names)) in numbers
    }
    found += _copied(parsed, places)
    wrote = {d: Arguments(stream.tree.get("args")).get("rank") for d, stream in weights.items()}
    if len({rank for rank in wrote.values() if type(rank) is int}) < 2:
        wrote = {}  # one process converted all: its number is nobody's place
    ranks = []
    for directory, names in directories.items():
        at = grid.coordinate(names)
        if at is None or at not in numbers or directory not in weights:
            continue
        stream = weights[directory]
        own = Arguments(stream.tree.get("args"))
        if own.record is not None and grid_of(own, directories.values()) != grid:
            said = sizes(grid_of(own, directories.values()))
            what = f"{stream.file} records {said}, the others {sizes(grid)}"
            found.append(finding("bad-metadata", what, file=stream.file, rank=numbers[at]))
            continue
        world, known = own.count("world_size"), args.count("world_size")
        if world and known and world != known:
            what = f"{stream.file} records a job of {world} ranks, the others one of {known}"
            found.append(finding("world-size", what, file=stream.file, rank=numbers[at]))
            continue
        rank = wrote.get(directory)
        outermost = not args.flag("use_tp_pp_dp_mapping")
        if type(rank) is int and not grid.may_be_of(rank, at, stages_outermost=outermost):
            what = f"{stream.file} was written by rank {rank}: it is the file of another directory"
            found.append(finding("wrong-rank", what, file=stream.file, rank=numbers[at]))
            continue
        try:
            held, rest = local_tensors(stream.tree, numbers[at])
        except CorruptError as error:
            error.file = stream.file
            found.append(from_error(error, rank=numbers[at]))
            continue
        except FtckptError as error:
            error.file = stream.file
            raise
        others = [s for p, s in parsed.items() if p.rpartition("/")[0] == directory]
        ranks.append(
            Rank(
                numbers[at],
                at,
                stream,
                held,
                rest,
                parsed.get(f"{directory}/{OPTIMIZER}"),
                [s for s in others if s.file.rpartition("/")[2] not in (WEIGHTS, OPTIMIZER)],
            )
        )
    ranks.sort(key=lambda rank: (rank.at.pp, rank.at.ep, rank.at.tp))
    return RankDirectories(
        grid=grid,
        args=args,
        ranks=ranks,
        # The trees are sorted into tensors and objects now and would double the memory.
        streams={path: stream._replace(tree=None) for path, stream in parsed.items()},
        numbers={
            p: numbers[at]
            for p in parsed
            if (at := grid.coordinate(directories[p.rpartition("/")[0]])) in numbers
        },
        members=set(members),
        found=found,
        notes=_opaque(parsed),
    )


def _copies(parsed: Mapping[str, TorchStream]) -> list[str]:
    """Return files that were saved under Megatron's names and renamed: `model_optim_rng.old.pt`.

    No other optimizer wrote them. A file of weights in the optimizer's place is not among them.
    """
    return [
        path
        for path, stream in parsed.items()
        if path.rpartition("/")[2] not in (WEIGHTS, OPTIMIZER)
        and stream.archive is not None
        and f"{stream.archive.prefix.rstrip('/')}.pt" in (WEIGHTS, OPTIMIZER)
    ]


def _copied(
    parsed: Mapping[str, TorchStream], places: Mapping[str, Coordinate]
) -> Iterator[Finding]:
    """Yield files that are, by the CRC-32 of every record, those of another stage or tensor rank.

    These hold other weights, even where a converter writes all ranks as one process. A stage
    without experts is the same on all expert ranks.
    """
    first: dict[tuple[object, ...], str] = {}
    for path, stream in sorted(parsed.items()):
        directory, _, name = path.rpartition("/")
        records = tuple((record, at.length, crc) for record, at, crc in stream.records)
        if name not in (WEIGHTS, OPTIMIZER) or directory not in places or not stream.storages:
            continue
        if any(crc is None for *_, crc in records):
            continue
        other = first.setdefault((name, places[directory].ep, *records), path)
        if other != path:
            what = f"{path} holds what {other} holds, byte for byte: one is the other rank's file"
            yield finding("wrong-rank", what, file=path)


def sizes(grid: MegatronGrid) -> str:
    """Return the sizes that a checkpoint has directories for, in words."""
    said = f"tp {grid.tp}, pp {grid.pp}, ep {grid.ep}"
    return said if grid.etp == grid.tp else f"{said}, experts' tp {grid.etp}"


def _directories(source: Source) -> dict[str, tuple[int, ...]]:
    """Return the ranks' directories that have a file of their own, in the order of their ranks."""
    named: dict[str, tuple[int, ...]] = {}
    for path in source.entries:
        directory, _, name = path.rpartition("/")
        ranks = directory_ranks(directory)
        if ranks is not None and name in (WEIGHTS, OPTIMIZER):
            named[directory] = ranks
    if any(f"{directory}/{WEIGHTS}" in source.entries for directory in named):
        return dict(sorted(named.items(), key=lambda item: (item[1], item[0])))
    inside = sorted(p for p in source.entries if directory_ranks(p.partition("/")[0]))
    if inside and not named:
        raise UnsupportedError(
            f"{source.url} has the directories of Megatron's ranks, but {inside[0]} in place of"
            f" {WEIGHTS}",
            file=inside[0],
        )
    raise IncompleteError(
        f"no directory of a rank in {source.url} has {WEIGHTS}: the save did not finish",
        hint="an earlier save may be complete",
    )


def _parsed(source: Source, paths: Sequence[str], found: list[Finding]) -> dict[str, TorchStream]:
    """Parse files; what is damaged is found, and raised where no weights are left."""
    good: dict[str, TorchStream] = {}
    broken: list[CorruptError] = []
    for path, stream in parse_files(source, paths).items():
        if isinstance(stream, CorruptError):
            broken.append(stream)
        elif path.endswith(f"/{WEIGHTS}") and not isinstance(stream.tree, dict):
            raise NewerWriterError.of(path, expected="a dict", found=stream.tree, file=path)
        else:
            good[path] = stream
    found += map(from_error, broken)
    if not any(path.endswith(f"/{WEIGHTS}") for path in good):
        raise broken[0]
    return good


def _require_version(path: str, tree: Mapping[Any, Any]) -> None:
    """Refuse what keeps queries, keys and values in an order of before 2021.

    Such rows must be permuted, which no list of boxes can say.
    """
    version = tree.get("checkpoint_version", 0)
    if type(version) not in (int, float) or version < 2:
        raise UnsupportedError(
            f"{path} has checkpoint_version {version}: before 2.0 Megatron kept the rows of"
            " queries, keys and values in another order",
            hint="load and save it with a Megatron-LM of 2021 or later",
            file=path,
        )


def _files_of(members: Iterable[str], weights: Mapping[str, TorchStream]) -> list[str]:
    """Return which files each directory has.

    The distributed optimizer keeps its state in a file of its own. That it was saved shows in the
    other files too: they have its parameter groups, which `--no-save-optim` leaves out. Optimizers
    that write further files are no evidence; of `layer_wise_optimizer_0.pt` see below.
    """
    names = {p.rpartition("/")[2] for p in members}
    saved = names <= {WEIGHTS, OPTIMIZER} and any(
        stream.tree.get("optimizer")
        and Arguments(stream.tree.get("args")).flag("use_distributed_optimizer")
        for stream in weights.values()
    )
    return [WEIGHTS, OPTIMIZER] if saved or OPTIMIZER in names else [WEIGHTS]


def _layer_wise_findings(
    source: Source, args: Arguments, grid: MegatronGrid, directories: Mapping[str, tuple[int, ...]]
) -> Iterator[Finding]:
    """Yield the data ranks whose part of a layer-wise optimizer is missing.

    Each data rank keeps the state of some parameters, and writes it to a file of its number beside
    the weights. Without all of them, the state is not whole.
    Source: `save_checkpoint` in megatron/training/checkpointing.py (core 0.16 to 0.20).
    """
    ranks = args.count("data_parallel_size") or 0
    named = str(args.get("optimizer") or "")
    layer_wise = args.flag("use_layer_wise_distributed_optimizer") or named == "dist_muon"
    if not layer_wise:
        return
    # Data ranks with other experts have directories of their own.
    groups: dict[tuple[int, int], list[str]] = {}
    for directory, said in directories.items():
        at = grid.coordinate(said)
        if at is not None:
            groups.setdefault((at.tp, at.pp), []).append(directory)
    for same in groups.values():
        for rank in range(min(ranks, _MOST_DATA_RANKS)):
            file = LAYER_WISE.format(rank)
            if not any(f"{directory}/{file}" in source.entries for directory in same):
                path = f"{same[0]}/{file}"
                source.require_absent(path)
                what = f"{path} is missing: the arguments record a layer-wise optimizer"
                yield finding("missing-rank", f"{what} of {ranks} data ranks", file=path)


def _grid_findings(
    source: Source,
    grid: MegatronGrid,
    directories: Mapping[str, tuple[int, ...]],
    files: Sequence[str],
) -> list[Finding]:
    """Return which ranks are missing, and which directories are of no rank."""
    expected = [grid.name(at) for at in grid.directories()]
    # A directory whose numbers are written in other widths is there all the same.
    present = {grid.name(at) for r in directories.values() if (at := grid.coordinate(r))}
    missing = [
        (number, f"{name}/{file}")
        for number, name in enumerate(expected)
        for file in files
        if f"{name}/{file}" not in source.entries and (name not in present or name in directories)
    ]
    found = []
    for number, path in missing[:_MISSING]:
        source.require_absent(path)
        what = f"{path} is missing: the arguments record {sizes(grid)}"
        found.append(finding("missing-rank", what, file=path, rank=number))
    if len(missing) > _MISSING:
        what = f"{len(missing) - _MISSING} more files of ranks are missing"
        found.append(finding("missing-rank", what))
    for directory, ranks in directories.items():
        at = grid.coordinate(ranks)
        if at is None or grid.name(at) not in expected:
            what = f"{directory} is of no rank: the arguments record {sizes(grid)}"
            found.append(finding("world-size", what, file=f"{directory}/{WEIGHTS}"))
    return found


def _opaque(parsed: Mapping[str, TorchStream]) -> list[Finding]:
    first: dict[str, str] = {}
    for path, stream in parsed.items():
        for name in stream.opaque:
            first.setdefault(name, path)
    return opaque_notes(first)
