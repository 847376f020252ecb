"""An example: a checkpoint that the target job saved itself, whose layout the result gets.

Where the trainer's own model decides which parameter lies where (flat partitions have no names), a
checkpoint that the job has saved, at its step 0 say, tells all of it. What its tensors hold is
never used. It must be sound as far as its structure shows; the pickles and headers that say the
layout were held to their checksums when they were parsed.

Detect that a source changed while it was read; then no result holds.

Refuse options that the writer of a layout does not support.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Protocol, runtime_checkable

from ftckpt.checkpoint import Checkpoint
from ftckpt.checkpoint.read_ahead import extents_of, reading_ahead
from ftckpt.errors import FtckptError, IncompleteError, NotFoundError, UsageError, worst
from ftckpt.findings import Finding, Severity, as_error
from ftckpt.storage.source import Source
from ftckpt.storage.store import Store
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import Layout, LayoutRequest, Writer
from ftckpt.transfer.places import require_apart, require_apart_from_all, require_outside
from ftckpt.verification import Level, VerifyOptions, verify


@contextmanager
def blamed(source: Source, names: Iterable[str]) -> Iterator[None]:
    """Say of a failure that the source is still being written, where it has changed meanwhile.

    Args:
        source: as it was listed.
        names: of its files that are read.

    Raises:
        IncompleteError: it has; whatever else was found in it is not known to be so.
    """
    try:
        yield
    except IncompleteError:
        raise
    except FtckptError as error:
        require_unchanged(source, names, error)
        raise


def require_unchanged(
    source: Source, names: Iterable[str], because: FtckptError | None = None
) -> None:
    """Raise IncompleteError where a source is another than it was when it was listed.

    Args:
        source: as it was listed.
        names: of the files that count.
        because: what failed; it stands where the source cannot even be listed.
    """
    wanted = sorted(set(names))
    try:
        changed = source.changed(wanted)
    except FtckptError:
        if because is None:
            raise
        return
    if isinstance(because, NotFoundError):
        # A stale listing still shows what was listed before and can no longer be read.
        listed = (name for name in wanted if name in source.entries)
        changed += (name for name in listed if source.path(name) == because.file)
    for name in changed:
        raise IncompleteError(
            f"{name} changed while it was being read: the source is still being written",
            hint="run it again when the save has finished",
            kind="changed-file",
            file=name,
        ) from because


RANKS = ("tp", "pp", "vp", "dp", "ep")
_ELSEWHERE = ("like",)  # `example` asks for writers that follow one


def flag(name: str) -> str:
    """Return the command line's spelling of a wish."""
    return f"--{name.replace('_', '-')}"


def require_granted(writer: Writer, request: LayoutRequest, used: Collection[str] = ()) -> None:
    """Refuse a wish that a writer has no use for.

    One rank along an axis is not a wish: what is not divided is of one.

    Args:
        writer: of the target format.
        request: what the user asks of the layout.
        used: names of options that something else uses (a reader, for rules).

    Raises:
        UsageError: the first of them.
    """
    for name in (field.name for field in fields(request)):
        wish = getattr(request, name)
        if wish is None or name in (*writer.supported_options, *used, *_ELSEWHERE):
            continue
        if name in RANKS and wish == 1:
            continue
        takes = ", ".join(map(flag, writer.supported_options))
        raise UsageError(
            f"{flag(name)} has no meaning for {writer.name} checkpoints, as they are written here",
            hint=f"leave it out; they are laid out by {takes}" if takes else "leave it out",
        )


_HINT = "let the job that is to load the result save one, at its first step"


@runtime_checkable
class FollowsExample(Protocol):
    """A writer that lays content out as `LayoutRequest.like` is; others cannot use an example."""

    def axes(self, example: Checkpoint) -> Mapping[str, int]:
        """Return the sizes that an example has of what `LayoutRequest` names, by those names.

        A wish for another size contradicts the example, and so does one that is not among them.
        """


def lay_out(
    writer: Writer,
    content: Content,
    request: LayoutRequest,
    destination: Store,
    *,
    used: Collection[str] = (),
) -> Layout:
    """Return the files of a result, as `writer` lays them out.

    Args:
        writer: of the target format.
        content: what is written.
        request: what the user asks of the layout; its example is checked first.
        destination: where the result goes.
        used: names of options that something else uses (see `supported_options`).

    Raises:
        UsageError: a wish that cannot be granted or has no meaning here, an example that the writer
            cannot use or that another wish contradicts.
        UnsupportedError: see `Writer.layout`.
        RefusedError: the destination lies in the source, what that depends on, or the example, or
            in a sealed checkpoint.
        NotFoundError: there is nothing to write.
        FtckptError: the example is damaged, by the exit code of what was found.
        IncompleteError: the source or the example changed meanwhile.
    """
    source, example = content.checkpoint, request.like
    require_outside(destination)
    require_apart_from_all(source, destination)
    _require_something(content)
    require_granted(writer, request, used)
    if example is not None:
        _require_usable(writer, request, example)
        require_apart(example.source, destination, "example")
        _require_sound(example)
    objects = extents_of(source, content.objects)
    with (
        blamed(source.source, source.members()),
        reading_ahead(source, objects, bases=False),
    ):
        layout = writer.layout(content, request)
    if example is not None:
        for name in example.source.changed(sorted(set(example.members()))):
            raise IncompleteError(
                f"{name} of the example changed while it was being read",
                hint="run it again when the save has finished",
                kind="changed-file",
                file=name,
            )
    return layout


def _require_something(content: Content) -> None:
    if content.tensors or content.objects:
        return
    url = content.checkpoint.source.url
    if content.dropped:
        raise NotFoundError(f"of {url} nothing is left to write", hint="leave out less of it")
    raise NotFoundError(f"{url} holds no tensor and no other state: there is nothing to write")


def _require_usable(writer: Writer, request: LayoutRequest, example: Checkpoint) -> None:
    if not isinstance(writer, FollowsExample):
        raise UsageError(
            f"--like: {writer.name} checkpoints are not laid out by an example",
            hint="leave it out: sizes of groups say all that this format needs",
        )
    if example.format != writer.name:
        raise UsageError(
            f"--like: {example.source.url} is a {example.format} checkpoint, and {writer.name} is"
            " to be written",
            hint=f"ftckpt convert --to {example.format}, or an example in {writer.name}",
        )
    has = writer.axes(example)
    for name in (*RANKS, "zero_stage", "max_shard_size"):
        wish = getattr(request, name)
        one = 1 if name in RANKS else None  # ranks that an axis does not have are one
        if wish is not None and wish != has.get(name, one):
            says = f"has {has[name]}" if name in has else "decides that itself"
            raise UsageError(
                f"{flag(name)} {wish} contradicts --like: the example {says}",
                hint="leave one of them out",
            )


def _require_sound(example: Checkpoint) -> None:
    """Refuse an example that may show another layout than the job's.

    Raises:
        FtckptError: what was found, by its exit code.
    """
    found: list[Finding] = []
    verify(example, VerifyOptions(Level.STRUCTURE), emit=found.append)
    errors = [one for one in found if one.severity is Severity.ERROR]
    code = worst(one.code for one in errors)
    for one in errors:
        if one.code is code:
            message = f"the example {example.source.url} cannot be trusted: {one.message}"
            raise as_error(replace(one, message=message), hint=_HINT)
