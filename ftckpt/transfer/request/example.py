"""An example: a checkpoint that the target job saved itself, whose layout the result gets.

Where the trainer's own model decides which parameter lies where (flat partitions have no names), a
checkpoint that the job has saved, at its step 0 say, tells all of it. What its tensors hold is
never used. It must be sound as far as its structure shows; the pickles and headers that say the
layout were held to their checksums when they were parsed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Protocol, runtime_checkable

from ftckpt.checkpoint import Checkpoint
from ftckpt.checkpoint.read_ahead import extents_of, reading_ahead
from ftckpt.errors import IncompleteError, NotFoundError, UsageError, worst
from ftckpt.findings import Finding, Severity, as_error
from ftckpt.storage.store import Store
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import Layout, LayoutRequest, Writer
from ftckpt.transfer.places import require_apart, require_apart_from_all, require_outside
from ftckpt.verification import Level, VerifyOptions, verify

from . import source_changes as changes
from .supported_options import RANKS, flag, require_granted

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
        changes.blamed(source.source, source.members()),
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
