"""What reads and writes no tensors: `inspect`, `du`, `cat`, `verify`, `seal`, `diff`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from ftckpt.checkpoint import Checkpoint
from ftckpt.errors import (
    CorruptError,
    ExitCode,
    FtckptError,
    NotFoundError,
    UnsafeError,
    UsageError,
    error_of,
)
from ftckpt.findings import listed
from ftckpt.progress import NULL, Counter
from ftckpt.storage import StoreOptions
from ftckpt.workers import Work

from .opening import STORES, chosen, opened, seconds
from .tables import read_renames, read_rules

if TYPE_CHECKING:
    from ftckpt.comparison import DiffReport
    from ftckpt.manifest import Manifest
    from ftckpt.manifest.seal import SealReport
    from ftckpt.verification import VerifyOptions, VerifyReport
    from ftckpt.verification.places import PlaceReport, Watcher


def verify(
    checkpoint: Checkpoint | str,
    *,
    level: str = "auto",
    require: str = "",
    all_: bool = False,
    oldest_first: bool = False,
    budget: float | str = "",
    also: Sequence[str] = (),
    against: Checkpoint | str = "",
    manifest: Manifest | str = "",
    sample: float | str = "",
    strict: Sequence[str] = (),
    fail_fast: bool = False,
    remember: bool = False,
    ledger: str = "",
    jobs: int = 0,
    limit_rate: float | str = "",
    stores: StoreOptions = STORES,
    counter: Counter = NULL,
    watcher: Watcher | None = None,
) -> PlaceReport:
    """Check that a checkpoint, or what a root holds, can be trusted.

    Damage is the report's code and findings, also where nothing can be opened; it is not raised.

    Args:
        checkpoint: opened, or a path; of a root the pointers and the newest are checked.
        level: `auto` (the best evidence there is), `structure`, `content` or `values`.
        require: `content`: bytes without evidence are the code UNVERIFIED.
        all_: every checkpoint of a root (the flag is `--all`).
        oldest_first: scrub a root: read what was not read for longest, and remember it.
        budget: seconds, or a text such as "1h", after which a scrub begins no further checkpoint.
        also: directories with more files of it (see `open_checkpoint`); nothing is remembered then.
        against: a replica to compare with, opened or its path.
        manifest: one that is kept elsewhere, read or its path.
        sample: the share of the content to read: 0.05 or "5%"; "" for all.
        strict: the classes of warnings that are errors (`ftckpt.findings.Strictness`), or "all".
        fail_fast: stop at the first error.
        remember: keep the verdict in the ledger of the root; implies `require="content"`.
        ledger: directory or URL of the ledger; "" for `.ftckpt/` in the root.
        jobs: threads; 0 for one a processor.
        limit_rate: bytes a second, or a text such as "200MiB/s".
        stores: how to reach object stores.
        counter: is told of the work.
        watcher: is told each finding and each verdict as it is made.

    Raises:
        NotFoundError, UsageError: the path names nothing, or an argument is not understood.
        UnavailableError, DeniedError, NoResourceError: the check could not be made.
    """
    from ftckpt.discovery.resolve import open_target
    from ftckpt.formats.catalog import FORMATS
    from ftckpt.formats.unsupported import hostile_in
    from ftckpt.verification import Level
    from ftckpt.verification.places import PlaceCheck, Watcher

    depth = chosen(Level, level, "--level")
    left = seconds(budget, "--budget") if budget != "" else None
    scrub = None
    if oldest_first or left is not None:
        from ftckpt.verification.scrub import scrubbing

        scrub = scrubbing(oldest_first, left, stores, ledger)
    if require not in ("", "content"):
        raise UsageError(f"--require {require!r} is not known", hint="content")
    check = PlaceCheck.asked(
        depth,
        hostile=hostile_in,
        stores=stores,
        work=Work.of(jobs, limit_rate, counter),
        watcher=watcher or Watcher(),
        require_content=bool(require),
        also=also,
        against=opened(against, stores) if against else None,
        manifest=manifest,
        sample=sample,
        strict=[strict] if isinstance(strict, str) else strict,
        fail_fast=fail_fast,
        remember=remember,
        ledger=ledger,
        scrub=oldest_first,
    )
    if not isinstance(checkpoint, str):
        if scrub is not None:
            raise UsageError("oldest_first is for the path of a root")
        return check.checkpoint(opened(checkpoint, stores, also=also))
    try:
        target = open_target(checkpoint, FORMATS, stores, also)
    except (CorruptError, UnsafeError) as error:
        return check.unopened(error, checkpoint)
    return check.target(target, everything=all_, scrub=scrub)


def seal(
    checkpoint: Checkpoint | str,
    *,
    level: str = "auto",
    manifest: str = "",
    force: bool = False,
    integrity: bool = False,
    jobs: int = 0,
    limit_rate: float | str = "",
    stores: StoreOptions = STORES,
    counter: Counter = NULL,
) -> SealReport:
    """Verify a checkpoint, then record digests of it, so that any later change is found.

    Args:
        checkpoint: opened, or a path as `open_checkpoint` takes it.
        level: how deep it is verified first, as in `verify`.
        manifest: path or URL to write to; "" for beside the data.
        force: replace a manifest that says something else.
        integrity: write Megatron's `integrity.json` too, where there is none.
        jobs: threads; 0 for one a processor.
        limit_rate: bytes a second, or a text such as "200MiB/s".
        stores: how to reach object stores.
        counter: is told of the work.

    Raises:
        CorruptError, UnsafeError, UnverifiedError: it does not pass, and is not sealed.
        IncompleteError: not committed, or a file changed meanwhile.
        RefusedError: another manifest, or a shorter `integrity.json`, stands there.
        UsageError: `integrity`, and it is not of Megatron's `torch_dist`.
        DeniedError: the place cannot be written.
    """
    from ftckpt.manifest import PassedCheck
    from ftckpt.manifest import seal as sealing
    from ftckpt.verification import Level, VerifyOptions
    from ftckpt.verification import verify as check

    target = opened(checkpoint, stores)
    place = sealing.locate(manifest, target.source.name, stores) if manifest else None
    work = Work.of(jobs, limit_rate, counter)
    depth = chosen(Level, level, "--level")
    # An old manifest is not evidence here: whether the content still fits it is for `seal` to say.
    options = VerifyOptions(level=depth, use_manifest=False)
    if integrity:
        from ftckpt.formats.dcp.integrity import require_checked, write_integrity

        require_checked(target.format)
    report = check(target, options, work=work)
    if report.code is not ExitCode.OK:
        hint = report.hint or "ftckpt.verify(PATH).findings"
        raise error_of(report.code, f"not sealed: {report.message}", hint=hint)
    checks = [PassedCheck(report.level, report.evidence, sealing.utc_now())]
    if integrity and write_integrity(target.source, work=work):
        target = opened(target.source.url, stores)
    sealed = sealing.seal(target, place=place, force=force, checks=checks, work=work)
    if place is None:  # else nothing was to be written beside the data
        remember_seal(target, options, report, stores)
    return sealed


def remember_seal(
    sealed: Checkpoint, options: VerifyOptions, report: VerifyReport, stores: StoreOptions
) -> None:
    """Keep the verdict of the check before a seal: it is about the files with their manifest now.

    The ledger saves time and nothing else, so a place that cannot be written does not fail.
    """
    from ftckpt.discovery.checks import Keeper
    from ftckpt.discovery.ledger import CheckedPlace, Ledger, place_of

    source = sealed.source
    with suppress(FtckptError):
        ledger, place = Ledger.around(source.store, place_of(source), "", stores)
        part = CheckedPlace(source.store, checkpoint=sealed, known_as=place)
        keeper = Keeper(ledger, options)
        keeper.end(part, keeper.begin(part), report)


def diff(
    a: Checkpoint | str,
    b: Checkpoint | str,
    *,
    component: Sequence[str] = (),
    tensor: Sequence[str] = (),
    rtol: float | None = None,
    atol: float | None = None,
    rename: str = "",
    rules: str = "",
    true_vocab_size: int | None = None,
    layout_state: bool = False,
    trust_recorded: bool = False,
    jobs: int = 0,
    limit_rate: float | str = "",
    stores: StoreOptions = STORES,
    counter: Counter = NULL,
) -> DiffReport:
    """Show what changed between two checkpoints, of any formats and topologies.

    Args:
        a: the first, opened, or a path as `open_checkpoint` takes it.
        b: the second.
        component: only these: `model`, `optimizer`, `exp_avg`, ..., `state`.
        tensor: only tensors of these names; `*` is any text.
        rtol: close is `|a - b| <= atol + rtol * |b|`; without both, bits are compared.
        atol: see `rtol`.
        rename: a TOML file of other names for the parameters of `a`.
        rules: a TOML file, or a family's name, of how tensors are divided over ranks.
        true_vocab_size: rows of the vocabulary that are no padding.
        layout_state: state that follows the grid of ranks counts too.
        trust_recorded: do not read what recorded digests or CRC-32s call equal.
        jobs: threads; 0 for one a processor.
        limit_rate: bytes a second, or a text such as "200MiB/s".
        stores: how to reach object stores.
        counter: is told of the bytes of one side.

    Raises:
        NotFoundError, UsageError: a path names no checkpoint, or nothing is of the choice.
        UnavailableError, DeniedError, NoResourceError: they could not be compared.
    """
    from ftckpt.comparison import Choice, Reading, compare
    from ftckpt.comparison.arithmetic import tolerance_of
    from ftckpt.comparison.worker_count import within_budget
    from ftckpt.formats.families.vocabulary import vocabulary_of
    from ftckpt.formats.grid_fields import follows
    from ftckpt.formats.huggingface.model_settings import with_settings
    from ftckpt.formats.state.fields import state_fields
    from ftckpt.transfer.content import Content
    from ftckpt.transfer.request.renaming import rename as renamed

    work, renames = Work.of(jobs, limit_rate, counter), read_renames(rename)
    table = read_rules(rules)
    first = opened(a, stores, rules=table)
    second = opened(b, stores, rules=table)
    ours = Content.of(first)
    report = compare(
        renamed(ours, renames) if renames else ours,
        Content.of(second),
        Reading(tolerance=tolerance_of(rtol, atol), trust_recorded=trust_recorded),
        fields=with_settings(state_fields, first, second),
        hangs=follows,
        vocabulary=vocabulary_of(first, second, true_vocab_size),
        choice=Choice(tuple(component), tuple(tensor), layout_state),
        work=within_budget(work, (first, second)),
    )
    if component and not (report.total.tensors or report.state_fields or report.findings):
        both = f"neither {first.source.url} nor {second.source.url}"
        raise NotFoundError(f"{both} has anything of {listed(list(component))}")
    return report
