"""Point a root at a checkpoint: each pointer in its framework's form.

    latest, latest_universal             DeepSpeed: the name of the checkpoint, as text
    latest_checkpointed_iteration.txt    Megatron-LM, verl: a step in decimal, or `release`
    dlrover_latest.txt                   DLRover: a step in decimal
    latest_ckpt_global_step.txt          SkyRL: a step in decimal
    latest_train_state.pt                Megatron-Bridge: a copy of the checkpoint's train_state.pt
    last-known-good                      ours: the name of the checkpoint, as text
    any other name                       an existing symbolic link

A pointer is replaced by one act: locally a rename, in an object store one conditional PUT. Its
previous content goes to the root's log first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

from ftckpt.errors import (
    ExistsError,
    FtckptError,
    IncompleteError,
    NotFoundError,
    RefusedError,
    UsageError,
)
from ftckpt.own_files import TEMPORARY
from ftckpt.retention.locks.local import lock_beside
from ftckpt.retention.records import log
from ftckpt.storage.local.atomic import sync_directory, write_new, write_over
from ftckpt.storage.local.oserror import translate
from ftckpt.storage.store import Entry, EntryKind, join
from ftckpt.storage.suggestions import hint_for_name

from .pointers import COPIES, FILES, GOOD, Pointer, text_of
from .roots import Child, Root, read_again

_LOCK, _EVENT = "promote.lock", "promoting"
_MARK = "promote-"
_MOST_COPIED = 1 << 20  # bytes
# The name of a step's directory for each tracker's readers: Megatron-LM pads to seven digits.
_BY_NUMBER = {
    "latest_checkpointed_iteration.txt": re.compile(r"iter_(\d{7,})|global_step_(\d+)"),
    "dlrover_latest.txt": re.compile(r"iter_(\d{7,})|(?:global_step_|checkpoint-|step[-_]?)?(\d+)"),
    "latest_ckpt_global_step.txt": re.compile(r"()global_step_(\d+)"),
    "latest_train_state.pt": re.compile(r"iter_(\d{7,})()"),
    "latest_step.txt": re.compile(r"iter_(\d{7,})|(?:global_step_|checkpoint-|step[-_]?)?(\d+)"),
}


class PointerMove(NamedTuple):
    """One pointer, before and after.

    Attributes:
        name: of the pointer, in the root.
        before: its content; None if it is new.
        after: its new content.
        link: whether it is a symbolic link.
        copied: the bytes to write, for a copy of a file in the checkpoint.
        replaced: its present bytes, likewise.
    """

    name: str
    before: str | None
    after: str
    link: bool = False
    copied: bytes = b""
    replaced: bytes = b""

    @property
    def changes(self) -> bool:
        """Whether there is anything to write."""
        return self.before != self.after


def moves(
    root: Root, target: str, step: int | None, asked: Sequence[str], *, backwards: bool
) -> tuple[PointerMove, ...]:
    """Return the moves of a root's pointers to a checkpoint; writes nothing.

    Args:
        root: as it is now.
        target: the checkpoint's name in the root.
        step: its step; None if unknown.
        asked: names of pointers; empty: those with a known name that mean checkpoints of the same
            format (DeepSpeed keeps one for each), or else `last-known-good`. Links of other names
            (`best`) have a meaning that promoting does not decide.
        backwards: whether a pointer may be moved to an earlier step.

    Raises:
        RefusedError: a pointer would move backwards, or its place is taken.
        UsageError: an unknown pointer name, or a tracker that cannot express this checkpoint.
    """
    standing = {pointer.name: pointer for pointer in root.pointers}
    usual = [n for n in sorted(standing) if n in FILES and _alike(root, standing[n], target)]
    names = tuple(dict.fromkeys(asked)) or tuple(usual) or (GOOD,)
    found = []
    for name in names:
        before = standing.get(name)
        if before is None:
            _require_free(root, name)
        elif before.leaves:
            raise RefusedError(
                f"{root.store.describe(join(root.base, name))} is a link to {before.says!r}, which"
                " lies outside the root: it is not read, and not moved",
                hint="make it a link to a checkpoint, or a file, if it is yours",
            )
        link = before is not None and _is_link(root, name)
        after = _text(name, target, step) if name in _BY_NUMBER and not link else target
        if before is not None and not backwards:
            _require_forwards(root, before, target, step)
        says = None if before is None else before.says
        if link and says is not None:
            # Keep its spelling: a relative link stays relative.
            folder, slash, _ = says.rstrip("/").rpartition("/")
            after = f"{folder}{slash}{target}"
        copied = _copies(root, name, target) if name in COPIES else (b"", b"")
        found.append(PointerMove(name, says, after, link, *copied))
    return tuple(found)


def _alike(root: Root, pointer: Pointer, target: str) -> bool:
    """Whether a pointer means a checkpoint of `target`'s format, or nothing."""
    names = {c.path: c for c in root.candidates}
    if pointer.target not in names or target not in names:
        return True
    formats = [
        child and child.part.format.name
        for child in (root.recognise(names[name]) for name in (pointer.target, target))
    ]
    return formats[0] == formats[1]


def _is_link(root: Root, name: str) -> bool:
    try:
        return root.store.stat(join(root.base, name)).link is not None
    except NotFoundError:
        return False


@contextmanager
def held(root: Root, actor: str) -> Iterator[Root]:
    """Exclude a second promotion of a root, and yield the root as it is now.

    Object stores need no lock: writes are conditional on what was read.

    Raises:
        RefusedError: another promotion is running.
        DeniedError, UnavailableError: the root cannot be written.
    """
    with ExitStack() as kept:
        path = root.store.local_path(root.base)
        if path is not None:
            try:
                folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                kept.callback(os.close, folder)
                kept.enter_context(
                    lock_beside(folder, root.url, actor, name=_LOCK, work="promotion")
                )
                _sweep(folder)
            except OSError as error:
                raise translate(error, root.url, "lock") from error
        yield read_again(root)


def move(
    root: Root, one: PointerMove, *, actor: str, now: float, fields: Mapping[str, object]
) -> None:
    """Write one pointer, after logging its previous content.

    `root` is as when `one` was made; `fields` also go to the log.

    Raises:
        RefusedError: the pointer was changed meanwhile.
        DeniedError, NoResourceError, UnavailableError: it could not be written.
    """
    said = {"actor": actor, "pointer": one.name, "from": one.before, "to": one.after, **fields}
    path = join(root.base, one.name)
    local = root.store.local_path(path)
    try:
        # The content behind the decision must still be there when it is replaced.
        entry = None if one.before is None else _still(root, one, root.store.stat(path))
        log.append(root, _EVENT, now, said)
        if local is not None:
            _move_here(root, local, one, entry)
        elif entry is None:
            root.store.create(path, one.copied or one.after.encode())
        else:
            root.store.replace(entry, one.copied or one.after.encode())
    except (ExistsError, IncompleteError, NotFoundError) as error:
        raise RefusedError(
            f"{root.store.describe(path)} was changed meanwhile: {error.message}",
            hint="look at what it says now, and promote again if that is meant",
        ) from error


def _still(root: Root, one: PointerMove, entry: Entry) -> Entry:
    if one.link:
        text = entry.link or ""
    elif one.copied:
        if root.store.read(entry.path, 0, entry.size) != one.replaced:
            raise IncompleteError("it is another copy now", kind="changed-file")
        return entry
    else:
        text = text_of(root.store, entry)
    if text != one.before:
        raise IncompleteError(f"it says {text}, not {one.before}", kind="changed-file")
    return entry


def _copies(root: Root, name: str, target: str) -> tuple[bytes, bytes]:
    """Return the checkpoint's file that a pointer copies, and the present copy.

    Raises:
        RefusedError: the checkpoint has no such file: its trainer would continue from another one.
    """
    found = []
    for path in (join(root.base, join(target, COPIES[name])), join(root.base, name)):
        try:
            size = root.store.stat(path).size
            if size > _MOST_COPIED:
                raise RefusedError(f"{root.store.describe(path)} is too large to be a pointer")
            found.append(root.store.read(path, 0, size))
        except NotFoundError:
            found.append(b"")
    if not found[0]:
        raise RefusedError(
            f"{name} is a copy of a checkpoint's {COPIES[name]}, and {target} has none",
            hint="its trainer resumes by that file alone",
        )
    return found[0], found[1]


def _move_here(root: Root, path: str, one: PointerMove, entry: Entry | None) -> None:
    """Write a pointer of a local root, under a temporary name that the next promotion knows."""
    data = one.copied or one.after.encode()
    if one.link:
        _relink(path, one.after)
    elif entry is None:
        write_new(path, data, mark=_MARK)
    else:
        root.store.require_still(entry)
        write_over(path, data, mark=_MARK)


def _sweep(folder: int) -> None:
    """Remove what a promotion that was killed has left; the lock says that no other one runs."""
    for name in os.listdir(folder):
        if name.startswith(TEMPORARY + _MARK):
            with suppress(OSError):
                os.unlink(name, dir_fd=folder)


def _relink(path: str, target: str) -> None:
    import secrets

    made = os.path.join(os.path.dirname(path), TEMPORARY + _MARK + secrets.token_hex(8))
    try:
        os.symlink(target, made)
        try:
            os.rename(made, path)
        except BaseException:
            os.unlink(made)
            raise
        sync_directory(os.path.dirname(path))
    except OSError as error:
        raise translate(error, path, "write") from error


def _require_free(root: Root, name: str) -> None:
    """Refuse a name that no framework reads, or that is taken.

    Raises:
        UsageError, RefusedError: one of them.
    """
    known = sorted({*FILES, *(pointer.name for pointer in root.pointers)})
    if name not in FILES:
        raise UsageError(
            f"{root.url} has no pointer {name}",
            hint=hint_for_name(name, known) or f"it may be one of {', '.join(known)}",
        )
    path = join(root.base, name)
    try:
        entry = root.store.stat(path)
    except NotFoundError:
        return
    except FtckptError as error:
        what = f"{root.store.describe(path)} is not a pointer"
        raise RefusedError(f"{what}: {error.message}") from error
    if entry.kind is not EntryKind.DIRECTORY or root.store.traits.local:
        raise RefusedError(
            f"{root.store.describe(path)} is not a pointer to a checkpoint of {root.url}",
            hint="move it away first",
        )


def _require_forwards(root: Root, before: Pointer, target: str, step: int | None) -> None:
    """Refuse to move a pointer to an earlier step.

    Raises:
        RefusedError: it would move backwards, or that cannot be determined.
    """
    if before.target == target:
        return
    if before.step is not None and step is not None and step >= before.step:
        return
    where = root.store.describe(join(root.base, before.name))
    if before.step is None or step is None:
        message = f"{where} says {before.says!r}: nothing shows whether {target} is later"
    else:
        message = f"{where} says step {before.step}, and {target} is step {step}"
    raise RefusedError(message, hint="--backwards allows it")


def _text(name: str, target: str, step: int | None) -> str:
    """Return a tracker's text for a checkpoint.

    Raises:
        UsageError: a reader of the tracker would look for another directory.
    """
    if target == "release" and name == "latest_checkpointed_iteration.txt":
        return target
    match = _BY_NUMBER[name].fullmatch(target)
    number = None if match is None else int(match[1] or match[2])
    if match is not None and match[1] and match[1] != f"{number:07d}":
        number = None
    if number is None or (step is not None and step != number):
        raise UsageError(
            f"{name} says a step in decimal, and {target} is not where its readers look for one",
            hint=f"--pointer {GOOD} says the name",
        )
    return str(number)


def find_in_root(root: Root, name: str) -> Child:
    """Return a checkpoint of a root by name.

    Raises:
        NotFoundError: the root has none of this name.
    """
    for candidate in root.candidates:
        if candidate.path == name:
            child = root.recognise(candidate)
            if child is not None:
                return child
    raise NotFoundError(f"{root.url} has no checkpoint {name}", hint="a pointer names one there")
