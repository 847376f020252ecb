"""The Python API: the verbs' capabilities with the formats put in.

With `__main__` the one door of the core that looks up to `ftckpt.formats`. Nothing here prints, and
failures are the errors of `ftckpt.errors`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ftckpt.discovery.candidates import child_of_step, newest_child
from ftckpt.discovery.open_part import open_part
from ftckpt.discovery.select import Note, Selection, SelectionRules, select
from ftckpt.discovery.wait import select_waiting
from ftckpt.formats.catalog import FORMATS
from ftckpt.formats.families.vocabulary import vocabulary_of
from ftckpt.formats.state.fields import state_fields
from ftckpt.formats.state.grid_fields import follows
from ftckpt.manifest.seal import SealReport
from ftckpt.replication.copy import CopyReport
from ftckpt.replication.copy import copy as _copy
from ftckpt.replication.options import ReplicationOptions
from ftckpt.replication.repair import RepairReport, settle
from ftckpt.replication.repair import repair as _repair
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import LayoutRequest
from ftckpt.transfer.request.example import lay_out
from ftckpt.transfer.run import TransferOptions, TransferReport, transfer

from . import inspection
from . import verification as _verification
from .checkpoint import Checkpoint
from .comparison import Choice, DiffReport, Reading
from .comparison import compare as _compare
from .discovery import resolve as opening
from .errors import ExitCode, UsageError
from .inspection import Inspection
from .manifest import PassedCheck
from .manifest import seal as sealing
from .progress import NULL, Counter
from .storage import StoreOptions, open_store
from .verification import VerifyOptions, VerifyReport

_STORES = StoreOptions()
_WISHES = LayoutRequest()
_OPTIONS = TransferOptions()
_REPLICATION = ReplicationOptions()
_READING = Reading()
_EVERYTHING = Choice()


def open_checkpoint(path: str, stores: StoreOptions = _STORES) -> Checkpoint:
    """Open one checkpoint: headers and metadata are parsed, tensor bytes are not.

    Args:
        path: a checkpoint, `ROOT@STEP` or `ROOT@latest`; local or any URL.
        stores: how to reach object stores.

    Raises:
        UsageError: a root without a selector, or a step that holds several checkpoints.
        NotFoundError: nothing is there.
        IncompleteError, CorruptError, UnsafeError, UnsupportedError: it cannot be opened.
    """
    target = opening.open_target(path, FORMATS, stores)
    if target.root is None or not target.place.which:
        return target.open()
    which = target.place.which
    root = target.root
    child = newest_child(root) if which == "latest" else child_of_step(root, int(which))
    if len(child.parts) > 1:
        raise UsageError(f"{root.url_of(child.candidate)} holds several checkpoints")
    return open_part(root.store, child.parts[0])


def inspect(checkpoint: Checkpoint | str, *, stores: StoreOptions = _STORES) -> Inspection:
    """Count what a checkpoint holds; reads no tensor bytes (see `ftckpt.inspection.inspect`).

    Args:
        checkpoint: opened, or a path as `open_checkpoint` takes it.
        stores: how to reach object stores.
    """
    return inspection.inspect(_opened(checkpoint, stores))


def verify(
    checkpoint: Checkpoint | str,
    options: VerifyOptions | None = None,
    *,
    stores: StoreOptions = _STORES,
    counter: Counter = NULL,
) -> VerifyReport:
    """Check that a checkpoint can be trusted; see `ftckpt.verification.verify`.

    Args:
        checkpoint: opened, or a path as `open_checkpoint` takes it.
        options: level and limits; the best evidence there is, where None.
        stores: how to reach object stores.
        counter: is told of the work.

    Raises:
        NotFoundError, UsageError: the path names no checkpoint.
        UnavailableError, DeniedError, NoResourceError: the check could not be made.
    """
    return _verification.verify(_opened(checkpoint, stores), options, counter=counter)


def seal(
    checkpoint: Checkpoint | str,
    manifest: str = "",
    *,
    force: bool = False,
    checks: Sequence[PassedCheck] = (),
    jobs: int = 1,
    stores: StoreOptions = _STORES,
    counter: Counter = NULL,
) -> SealReport:
    """Record digests of a checkpoint; see `ftckpt.manifest.seal.seal`. It does not verify first.

    Args:
        checkpoint: opened, or a path as `open_checkpoint` takes it.
        manifest: path or URL to write to; "" for beside the data.
        force: replace a manifest that says something else.
        checks: what passed before, for the record.
        jobs: number of threads.
        stores: how to reach object stores.
        counter: is told of the work.

    Raises:
        IncompleteError: not committed, or a file changed meanwhile.
        CorruptError: a file of the checkpoint is missing.
        RefusedError: another manifest stands there.
        DeniedError: the place cannot be written.
    """
    opened = _opened(checkpoint, stores)
    place = sealing.locate(manifest, opened.source.name, stores) if manifest else None
    return sealing.seal(opened, place=place, force=force, checks=checks, jobs=jobs, counter=counter)


def convert(
    checkpoint: Checkpoint | str,
    destination: str,
    to: str = "",
    *,
    wishes: LayoutRequest = _WISHES,
    derive: Callable[[Content], Content] = lambda content: content,
    options: TransferOptions = _OPTIONS,
    stores: StoreOptions = _STORES,
    counter: Counter = NULL,
) -> TransferReport:
    """Write a checkpoint in another format, or in its own for other ranks.

    See `ftckpt.transfer.run.transfer`; the source is verified first unless `options.proof` is
    False.

    Args:
        checkpoint: opened, or a path as `open_checkpoint` takes it.
        destination: a path or URL that does not exist yet; `NAME.safetensors` is one file.
        to: the format to write; "" for that of `wishes.like`, else the source's own.
        wishes: sizes of the groups of ranks, largest file, split rules; a checkpoint of the target
            job to be laid out as.
        derive: what is written, made of what is there: fewer tensors, other names or types
            (`ftckpt.transfer.request.narrowing`, `renaming`, `retyping`;
            `ftckpt.formats.families`).
        options: threads, rate, device, proof.
        stores: how to reach object stores.
        counter: is told of the work.

    Raises:
        UsageError: a wish that a shape cannot grant, or that the example contradicts.
        UnsupportedError: the format cannot be written, or has no place for something.
        ExistsError: something stands at the destination.
        RefusedError: it lies inside a checkpoint, or another run is writing there.
        CorruptError: the source or the example is damaged, or the proof failed; nothing is visible.
    """
    from ftckpt.formats.state.same_object import SameObject
    from ftckpt.formats.writers import format_and_writer

    opened = _opened(checkpoint, stores)
    named = to or (wishes.like or opened).source_format
    target, writer = format_and_writer(named, wishes.rules, destination)
    content = derive(Content.of(opened))

    def check() -> VerifyReport:
        checks = VerifyOptions(jobs=options.jobs, limiter=options.limiter)
        return _verification.verify(opened, checks, counter=counter)

    return transfer(
        content,
        lay_out(writer, content, wishes, open_store(destination, stores)),
        destination,
        target,
        single=writer.single,
        same_objects=SameObject,
        options=options,
        store_options=stores,
        check=check if options.proof else None,
        counter=counter,
    )


def copy(
    checkpoint: Checkpoint | str,
    destination: str,
    options: ReplicationOptions = _REPLICATION,
    *,
    stores: StoreOptions = _STORES,
    counter: Counter = NULL,
) -> CopyReport:
    """Copy a checkpoint to another tier; see `ftckpt.replication.copy.copy`.

    Args:
        checkpoint: opened, or a path as `open_checkpoint` takes it.
        destination: path or URL of the copy; `DIR/` for its own name in DIR.
        options: threads, rate, proof.
        stores: how to reach object stores.
        counter: is told of the work.

    Raises:
        CorruptError: the source is damaged, or what stands there already, or the proof failed.
        ExistsError: something else stands at the destination.
        RefusedError: it lies inside a checkpoint, or another run is writing there.
        IncompleteError: the source is not committed, or changed meanwhile.
    """
    opened = _opened(checkpoint, stores)
    return _copy(opened, destination, options=options, stores=stores, counter=counter)


def repair(
    path: str,
    replica: str,
    to: str = "",
    options: ReplicationOptions = _REPLICATION,
    *,
    dry_run: bool = False,
    stores: StoreOptions = _STORES,
    counter: Counter = NULL,
) -> RepairReport:
    """Mend a checkpoint from a replica; see `ftckpt.replication.repair.repair`.

    Args:
        path: the damaged one; it need not open.
        replica: another copy of it.
        to: path or URL of the mended one; "" for the place of the damaged one.
        options: threads, rate, proof.
        dry_run: look for damage, and do no more.
        stores: how to reach object stores.
        counter: is told of the work.

    Raises:
        CorruptError: a block is damaged in both.
        RefusedError: the replica is of another checkpoint.
        UnverifiedError: nothing says which of two bytes is right.
        UsageError: it lies in an object store and `to` is not given.
    """
    settle(opening.files_at(path, FORMATS, stores))
    return _repair(
        opening.files_at(path, FORMATS, stores),
        opening.files_at(replica, FORMATS, stores),
        opened=partial(opening.open_source, formats=FORMATS),
        to=to,
        dry_run=dry_run,
        options=options,
        stores=stores,
        counter=counter,
    )


def diff(
    a: Checkpoint | str,
    b: Checkpoint | str,
    reading: Reading = _READING,
    choice: Choice = _EVERYTHING,
    *,
    derive: Callable[[Content], Content] = lambda content: content,
    true_vocab_size: int | None = None,
    stores: StoreOptions = _STORES,
    counter: Counter = NULL,
) -> DiffReport:
    """Compare two checkpoints; see `ftckpt.comparison.compare`.

    Args:
        a: the first, opened, or a path as `open_checkpoint` takes it.
        b: the second, of any format and topology.
        reading: tolerances, what is read, limits; bits, where nothing is said.
        choice: which part; all, where nothing is said.
        derive: gives the tensors of `a` the names that they have in `b`.
        true_vocab_size: rows of the vocabulary that are no padding.
        stores: how to reach object stores.
        counter: is told of the bytes of one side.

    Raises:
        NotFoundError, UsageError: a path names no checkpoint, or nothing is of the choice.
        UnavailableError, DeniedError, NoResourceError: they could not be compared.
    """
    ours, theirs = _opened(a, stores), _opened(b, stores)
    return _compare(
        derive(Content.of(ours)),
        Content.of(theirs),
        reading,
        fields=state_fields,
        hangs=follows,
        vocabulary=vocabulary_of(ours, theirs, true_vocab_size),
        choice=choice,
        counter=counter,
    )


def _opened(checkpoint: Checkpoint | str, stores: StoreOptions) -> Checkpoint:
    return open_checkpoint(checkpoint, stores) if isinstance(checkpoint, str) else checkpoint


def latest(
    root: str,
    options: VerifyOptions | None = None,
    rules: SelectionRules | None = None,
    *,
    wait: float = 0.0,
    stores: StoreOptions = _STORES,
    counter: Counter = NULL,
    note: Note = lambda _: None,
) -> Selection:
    """Choose the newest checkpoint of a root that passes; see `ftckpt.discovery.select.select`.

    Args:
        root: directory or URL that holds the checkpoints.
        options: how each is checked; structure where None.
        rules: how far to walk back; over damaged and unfinished ones where None.
        wait: seconds to wait for a newer save in flight.
        stores: how to reach object stores.
        counter: is told of the work.
        note: is told why a newer one was not taken.

    Raises:
        MissingError: the root does not exist.
        UsageError: it is one checkpoint.
        UnavailableError, DeniedError: the root could not be listed.
    """
    checks = options or VerifyOptions(_verification.Level.STRUCTURE)
    rules = rules or SelectionRules()

    def check(checkpoint: Checkpoint) -> tuple[ExitCode, str]:
        report = _verification.verify(checkpoint, checks, counter=counter)
        return report.code, report.message

    if wait:
        return select_waiting(
            lambda: opening.open_root(opening.locate_root(root, stores), FORMATS),
            check, rules, wait, note,
        )  # fmt: skip
    return select(opening.open_root(opening.locate_root(root, stores), FORMATS), check, rules, note)
