"""Checkpoints of one file a rank: every rank ran `torch.save` on what it held.

The unit is one step. verl's `global_step_N` is a checkpoint: its `actor` is the model and `critic`
the component `extra:critic`; the folder `actor` alone opens too. Other folders of rank files are
`ftckpt.formats.folders`' matter, which knows more names of models that a job trains together.
Nothing marks the end of a save, so a missing rank is a defect of the set and no proof of a crash.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from ftckpt.checkpoint import Commit, CommitState
from ftckpt.discovery.recognise import Listing, Recognition
from ftckpt.discovery.series import roles_in
from ftckpt.discovery.step_names import set_member
from ftckpt.formats.state.side_by_side import OF_PIECE, VERSIONS
from ftckpt.storage.source import Source
from ftckpt.storage.state_files import parts_among
from ftckpt.storage.store import EntryKind

from .names import FOLDERS, MAIN, METADATA, RankFile, rank_file, rank_files

if TYPE_CHECKING:
    from ftckpt.checkpoint.sharding import Rules
    from ftckpt.errors import FtckptError
    from ftckpt.findings import Finding

    from .checkpoint import RanksCheckpoint

# Of a model of Hugging Face's.
CONFIG = "config.json"
_WEIGHTS = frozenset(("model.safetensors", "model.safetensors.index.json"))
_OF_RANK = re.compile(r"rank[-_]?\d+\.")
_EXPORTED = (".safetensors", ".safetensors.index.json")


class Marked(Protocol):
    """A save of a trainer that marks its end (see `ftckpt.formats.trainer_dirs.names`)."""

    @property
    def trainer(self) -> str:
        """Who wrote it."""

    @property
    def lacks(self) -> str:
        """The mark that is not there; "" if the save finished."""

    @property
    def marks(self) -> Collection[str]:
        """The marks that are there."""

    @property
    def beside(self) -> Collection[str]:
        """Further files of the trainer."""

    @property
    def notes(self) -> Sequence[Finding]:
        """What is perhaps wrong with it."""

    def error(self) -> FtckptError:
        """Return that the save did not finish."""


_Head = Callable[[str, int], bytes]
Marks = Callable[[Collection[str], Collection[str], _Head], Marked | None]


class Ranks:
    """One file a rank (fits `ftckpt.discovery.recognise.Format`)."""

    name = "ranks"

    def __init__(self, rules: Rules | None = None, marked: Marks = lambda *_: None) -> None:
        """Read by `rules` how plain tensors are cut, where nothing beside them says it.

        `marked` knows the trainers that mark the end of a save, by the names of a directory.
        """
        self.rules = rules
        self.marked = marked

    def recognise(self, listing: Listing) -> Recognition | None:
        """Say whether rank files lie in the listing, or in verl's folder of the model."""
        if listing.single:
            return self._named_by(listing.single, listing.beside)
        files = rank_files(listing.files)
        folder, parts = "", parts_among(listing.files)
        if not files and MAIN in listing.directories:
            folder = f"{MAIN}/"
            files = rank_files(listing.inside(MAIN).files)
            for name in sorted(set(FOLDERS) & set(listing.directories)) if files else ():
                parts |= parts_among(listing.inside(name).files, f"{name}/")
        if not files or (not folder and _weights_beside(listing, files)):
            return None
        if len({_save_of(file) for file in files}) > 1 or any(set_member(f.path) for f in files):
            return None  # files of several saves in one directory: each save is a checkpoint
        if not folder and _name_no_step(files, listing.files):
            return None
        by = None if folder else self.marked(listing.files, listing.directories, listing.head)
        if by is not None and by.lacks:
            return Recognition(self.name, f"lacks {by.lacks}", CommitState.UNCOMMITTED)
        finished = not folder and (METADATA in listing.files or (by is not None and by.marks))
        state = CommitState.COMMITTED if finished else CommitState.NO_MARKER
        reason = f"has {folder}{files[0].path}"
        return Recognition(self.name, reason, state, parts=tuple(sorted(parts)))

    def _named_by(self, name: str, is_beside: Callable[[str], bool]) -> Recognition | None:
        """Know a checkpoint by one of its files, where several saves may share a directory.

        What a name calls the last or the best is one where another rank's file lies beside.
        """
        file = rank_file(name)
        if file is None:
            return None
        word = _save_of(file)[1]
        others = (file.of_rank(rank) for rank in range(3) if word and rank != file.rank)
        if file.step is None and not any(map(is_beside, others)):
            return None
        called = word if file.step is None else f"step {file.step}"
        reason = f"is a {file.unit}'s file of {called}"
        return Recognition(self.name, reason, CommitState.NO_MARKER, shares=True)

    def open(self, source: Source) -> RanksCheckpoint:
        """Parse the pickles of all ranks and put their tensors together.

        Raises:
            IncompleteError: the trainer marks the end of a save, and a mark is not there.
            NotFoundError: no rank's file is there.
            CorruptError: no rank's file can be parsed, or a compressed one cannot be undone; damage
                of some is a finding of `check`.
            UnsafeError, UnsupportedError: of the first file that is hostile or cannot be read.
        """
        from .reader import open_ranks

        source = _of_one_step(source) if source.single else source
        by = None
        if not source.named:
            names = [name for name in source.entries if "/" not in name]
            folders = {name.partition("/")[0] for name in source.entries if "/" in name}
            by = self.marked(names, folders, source.head)
        if by is not None and by.lacks:
            raise by.error()
        checkpoint = open_ranks(_unpacked(source), self.rules)
        if by is not None:
            checkpoint.files = sorted({*checkpoint.files, *by.marks, *by.beside})
            if by.marks:
                checkpoint.commit = Commit(CommitState.COMMITTED, min(by.marks))
            checkpoint.notes = [*checkpoint.notes, *by.notes]
            checkpoint.dialect = checkpoint.dialect or f"written by {by.trainer}"
        return checkpoint


def _unpacked(source: Source) -> Source:
    """Return the files as they are read: what was compressed is undone."""
    files = [file.path for file in rank_files(source.entries) if file.packed]
    if not files:
        return source
    from ftckpt.formats.torch_files.compression import UnpackedSource, packed_by

    codecs = {path: codec for path in files if (codec := packed_by(source, path)) is not None}
    return UnpackedSource.over(source, codecs) if codecs else source


def _save_of(file: RankFile) -> tuple[int | None, str]:
    """Return the step in the name of a rank's file, else the word that tells it: `last`, `best`."""
    return file.step, "" if file.step is not None else "-".join(sorted(roles_in(file.word)))


def _of_one_step(source: Source) -> Source:
    """Return the files of the step that one of its files names."""
    name = next(iter(source.entries))
    mine = rank_file(name)
    skip = len(source.base) + 1 if source.base else 0
    entries = [
        entry
        for entry in source.store.children(source.base)
        if entry.kind is not EntryKind.DIRECTORY
        and (file := rank_file(entry.path[skip:])) is not None
        and mine is not None
        and (_save_of(file), file.staged) == (_save_of(mine), mine.staged)
    ]
    return Source.some_of(source.store, source.base, name, entries)


def _name_no_step(files: Sequence[RankFile], names: Iterable[str]) -> bool:
    """Whether rank files are the `latest` or `best` of a run whose numbered saves lie beside them.

    composer links `latest-rank0.pt` to the newest of `ep0-ba100-rank0.pt` (composer/callbacks/
    checkpoint_saver.py).
    """
    if not all(_is_version(file.path) for file in files):
        return False
    mine = {file.path for file in files}
    others = (name for name in names if name not in mine and _OF_RANK.search(name))
    return any(re.search(r"\d", OF_PIECE.sub("", name)) for name in others)


def _is_version(name: str) -> bool:
    words = set(re.findall(r"[a-z]+", OF_PIECE.sub("", name).rpartition(".")[0].lower()))
    return bool(words) and words <= VERSIONS


def _weights_beside(listing: Listing, files: Sequence[RankFile]) -> bool:
    """Whether the model is what lies in safetensors files beside.

    It is where no rank's file may hold one (optimizers, states of random numbers): read as `ranks`,
    the weights would be a stray file. It is too where a model of Hugging Face's is published with
    its release: Mistral's and Meta's repositories hold `consolidated.00.pth` in this way. verl's
    names are a trainer's, whatever was exported beside them.
    """
    if not any(name.endswith(_EXPORTED) for name in listing.files):
        return False
    if not any(file.may_hold_model for file in files):
        return True
    whole = _WEIGHTS & listing.files.keys()
    return bool(whole) and CONFIG in listing.files and all(f.spelling is not None for f in files)
