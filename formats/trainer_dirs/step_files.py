"""Open one step of several whose files share a directory (see `ftckpt.discovery.step_names`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from ftckpt.checkpoint import TensorInfo
from ftckpt.discovery.step_names import SetMember, set_around, set_member, set_of
from ftckpt.findings import Finding, finding
from ftckpt.formats.ranks.reader import open_ranks
from ftckpt.formats.torchsave.reader import open_files
from ftckpt.storage.source import Source
from ftckpt.storage.store import EntryKind

from .checkpoint import OpenedPart, parameters


@dataclass
class StepFiles:
    """The files of one step, opened.

    Attributes:
        source: its files alone.
        parts: weights first.
        document: the JSON file beside them; "" for none.
        wrong: what is missing.
    """

    source: Source
    parts: list[OpenedPart] = field(default_factory=list)
    document: str = ""
    wrong: list[Finding] = field(default_factory=list)


def open_step_files(single: Source) -> StepFiles:
    """Open the step that one of its files names.

    Args:
        single: the file.

    Raises:
        CorruptError, UnsafeError, UnsupportedError: of a file (see `open_files`).
    """
    name = next(iter(single.entries))
    skip = len(single.base) + 1 if single.base else 0
    beside = {
        entry.path[skip:]: entry
        for entry in single.store.children(single.base)
        if entry.kind is not EntryKind.DIRECTORY and set_member(entry.path[skip:]) is not None
    }
    mine = set_around(name, beside.__contains__)
    assert mine is not None
    members = set_of(mine, beside)
    entries = [beside[one] for one in members]
    made = StepFiles(Source.some_of(single.store, single.base, name, entries))
    known: list[tuple[str, TensorInfo]] = []
    by_place = sorted(members, key=lambda one: (members[one].place, members[one].rank or 0))
    for one in by_place:
        member = members[one]
        if one.endswith(".json"):
            made.document = one
        elif member.place == 0:
            made.parts.append(
                OpenedPart("", open_files(_some(made.source, one), [one], role="model"))
            )
            known = parameters(made.parts)
        elif one.startswith("ema"):
            opened = open_files(_some(made.source, one), [one], role="model")
            made.parts.append(OpenedPart("", opened, model="ema"))
        elif member.rank is None:
            opened = open_files(_some(made.source, one), [one], role="optimizer", weights=known)
            made.parts.append(OpenedPart("", opened))
    ranks = [one for one in by_place if members[one].rank is not None]
    alone = {m.rank for one in beside if (m := set_member(one)) and m.kind == mine.kind} == {
        None,
        0,
    }
    if ranks and alone:  # a job of one rank: its optimizer is that of all parameters
        opened = open_files(_some(made.source, *ranks), ranks, role="optimizer", weights=known)
        made.parts.append(OpenedPart("", opened))
    elif ranks:
        made.parts.append(OpenedPart("", open_ranks(_some(made.source, *ranks), None)))
    made.wrong += _lost(mine, members, beside)
    return made


def _some(source: Source, *names: str) -> Source:
    return replace(source, entries={name: source.entries[name] for name in names})


def _lost(
    mine: SetMember, members: Mapping[str, SetMember], beside: Mapping[str, object]
) -> Iterator[Finding]:
    """Yield the files of rank 0 that are not there, if another step or file shows that they were.

    Nothing marks the end of such a save.
    """
    others = [
        other
        for one in beside
        if one not in members and (other := set_member(one)) is not None and other.kind == mine.kind
    ]
    places = {member.place for member in members.values()}
    documents = [one for one in members if one.endswith(".json")]
    if 0 not in places:
        shown = documents[0] if documents else "a file of another step"
        what = f"{mine.model} is missing: it is saved before the others of its step"
        if documents or any(other.place == 0 for other in others):
            yield finding("missing-rank", f"{what}, and {shown} shows it", file=mine.model, rank=0)
        else:
            yield finding("state-unknown", what, file=mine.model)
    lost = {other.place for other in others if other.rank is None} - places
    for place in sorted(lost - {0}):
        like = next(one for one in beside if (m := set_member(one)) and m.place == place)
        own = set_member(like)
        name = like.replace(own.digits, mine.digits) if own is not None else like
        what = f"{name} is missing: other steps have such a file"
        yield finding("missing-rank", what, file=name, rank=0)
