"""Whether checkpoints can be trusted: `verify`, `scrub`, and `seal` for what is found later."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated

from ftckpt import amounts
from ftckpt.errors import (
    CorruptError,
    ExitCode,
    FtckptError,
    NotFoundError,
    UnsafeError,
    UsageError,
    error_of,
)
from ftckpt.findings import Level, parse_strictness
from ftckpt.observer import SILENT, Observer
from ftckpt.own_files import MANIFEST
from ftckpt.reports import IF_SOME, UNSAID, Natural
from ftckpt.storage import StoreOptions
from ftckpt.workers import Work

from .definition import argument, operation, option, switch
from .many import ALONE, Machines, Session
from .opening import (
    STORES,
    Also,
    Jobs,
    Memory,
    Opened,
    Rate,
    chosen,
    open_from,
    open_target,
    opened,
)

if TYPE_CHECKING:
    from ftckpt.checkpoint import Checkpoint
    from ftckpt.discovery.resolve import Target
    from ftckpt.findings import Finding
    from ftckpt.manifest import Manifest, PassedCheck
    from ftckpt.manifest.signature import Trust
    from ftckpt.storage.store import Store
    from ftckpt.verification import VerifyOptions, VerifyReport
    from ftckpt.verification.places import PlaceCheck, PlaceReport

    from .signing import Signing


_Replica = Annotated[
    "Checkpoint | str", option("OTHER", "A replica to compare with, byte by byte.")
]
_Kept = Annotated["Manifest | str", option("FILE", "A manifest that is kept elsewhere.")]


_Depth = Annotated[
    Level | str,
    option("", "structure: headers; content: every byte; values: the numbers too."),
]
_Strict = Annotated[
    Sequence[str],
    option(
        "[=CLASS,...]",
        "Treat warnings as errors, or those alone of replicas, masters, values, stale, "
        "steps, names, pointers, counts, sizes, links, opaque, odd.",
        bare="all",
    ),
]
_Ledger = Annotated[str, option("DIR", "Where verdicts are remembered; else .ftckpt/ in the root.")]
_SIGNATURE = "Signature"
_Chain = Annotated[
    Sequence[str],
    option(
        "CERT",
        "A certificate that vouches for the signer's, up to the root, in PEM. Repeatable.",
        "--certificate-chain",
        under=_SIGNATURE,
    ),
]


@operation(
    examples=(
        ("ftckpt verify /ckpt/run7/step-1000", "by the best evidence that there is"),
        ("ftckpt verify /ckpt/run7 --all --level structure", "every checkpoint of a root"),
        ("ftckpt verify s3://run7/ckpt@1000 --level content", "exit 6 without evidence"),
        ("ftckpt verify /nvme/step-9 --against s3://run7/ckpt/step-9", "compare with a replica"),
        ("ftckpt verify /n0/step-9 --also /n1/step-9", "whose shards lie on two nodes' disks"),
        ("ftckpt verify run/step-9 --remember", "so that `latest`, `gc` and `status` know of it"),
        (
            "ftckpt verify big/ --sample 5% --limit-rate 200MiB/s",
            "a share, beside a trainer",
        ),
        (
            "ftckpt verify model/ --signature --public-key lab.pub",
            "every file is as the holder of that key signed it",
        ),
        (
            "ftckpt verify step-9 --level values --strict=replicas,masters",
            "unequal copies fail",
        ),
        ("srun ftckpt verify step-9 --part auto --finish-last", "by all nodes of a job"),
    ),
    codes={
        ExitCode.OK: "everything that the evidence allows was checked and passed",
        ExitCode.CORRUPT: "proven damage; the findings name file, tensor, rank and bytes",
        ExitCode.INCOMPLETE: "not committed, in writing, or changed meanwhile; parts missing",
        ExitCode.UNVERIFIED: "content was demanded and no evidence covers it; no signature",
        ExitCode.UNSAFE: "hostile or ambiguous content, or not signed by whom it must be",
        ExitCode.REFUSED: "parts do not fit together: another plan, or a record that is not whole",
        ExitCode.NOT_FOUND: "no checkpoint there",
        ExitCode.UNAVAILABLE: "",
        ExitCode.DENIED: "",
        ExitCode.NO_RESOURCE: "",
        ExitCode.UNSUPPORTED: "recognised, but not readable by this version",
    },
    everyday=("--level", "--all", "--against", "--also", "--sample", "--remember"),
)
def verify(
    checkpoint: Opened,
    *,
    level: _Depth = Level.AUTO,
    all_: Annotated[
        bool, switch("--all", "Every checkpoint of a root; the worst code wins.")
    ] = False,
    also: Also = (),
    against: _Replica = "",
    manifest: _Kept = "",
    sample: Annotated[
        amounts.Share, option("SHARE", "Read only this share of the content: 5%.")
    ] = "",
    strict: _Strict = (),
    fail_fast: Annotated[bool, switch("--fail-fast", "Stop at the first error.")] = False,
    remember: Annotated[
        bool,
        switch(
            "--remember", "Keep the verdict in the ledger of the root; implies --level content."
        ),
    ] = False,
    ledger: _Ledger = "",
    signature: Annotated[
        str,
        option(
            "[=FILE]",
            "Hold every file to a signature (OpenSSF model signing); alone: to the one beside.",
            bare="beside",
            under=_SIGNATURE,
        ),
    ] = "",
    public_key: Annotated[
        str, option("KEY", "Whose signature it must be: a public key in PEM.", under=_SIGNATURE)
    ] = "",
    certificate_chain: _Chain = (),
    identity: Annotated[
        str,
        option("WHO", "Of Sigstore, who must have signed; needs the network.", under=_SIGNATURE),
    ] = "",
    identity_provider: Annotated[
        str, option("URL", "Who vouches for --identity.", under=_SIGNATURE)
    ] = "",
    jobs: Jobs = 0,
    limit_rate: Rate = "",
    max_memory: Memory = "1GiB",
    division: Machines = ALONE,
    stores: StoreOptions = STORES,
    on: Observer = SILENT,
) -> PlaceReport:
    """Check a checkpoint, and name the evidence for the verdict.

    Structure first: missing, truncated, swapped and stray files, holes and overlaps, mixed steps.
    Then the content, by the manifest that `ftckpt seal` wrote, else by the CRC-32s that torch puts
    into its files and never checks. What nothing covers is named. With --signature, by what the
    signer signed: whose the files are, and not only whether they changed.

    Returns:
        The verdict: damage is its code and findings, also where nothing can be opened. Of a
        `division` that has its part done here: a `many.PartReport`.

    Raises:
        NotFoundError, UsageError: the path names nothing, or an argument is not understood.
        UnavailableError, DeniedError, NoResourceError: the check could not be made.
    """
    from ftckpt.formats.unsupported import hostile_in
    from ftckpt.manifest.locate import read_at
    from ftckpt.verification import VerifyOptions
    from ftckpt.verification.places import PlaceCheck

    depth = chosen(Level, level, "--level")
    if division.asked and (all_ or fail_fast or remember):
        # A verdict says that all bytes were read just now.
        raise UsageError(
            "--part is for one checkpoint that is read whole: not with --all, --fail-fast or "
            "--remember"
        )
    if remember and (depth is Level.STRUCTURE or sample):
        raise UsageError("--remember needs a check of the whole content")
    if ledger and not remember:
        raise UsageError("--ledger needs --remember")
    if also and remember:
        raise UsageError("--remember is for a checkpoint in one place, and --also names more")
    trust = None
    if signature or public_key or certificate_chain or identity or identity_provider:
        trust = _trusted(
            signature, public_key, certificate_chain, identity, identity_provider, stores
        )
        whole = depth is not Level.STRUCTURE and not (sample or against)
        single = not (all_ or remember or also or division.asked)
        if not (whole and single):
            raise UsageError(
                "--signature is for one checkpoint that is read whole: not with --level structure,"
                " --sample, --against, --also, --all, --remember or --part"
            )
    options = VerifyOptions(
        level=depth,
        require_content=remember,
        strict=parse_strictness(strict),
        fail_fast=fail_fast,
        sample=amounts.share(sample) if sample else None,
        manifest=read_at(manifest, stores) if isinstance(manifest, str) else manifest,
        against=opened(against, stores) if against else None,
        signature=trust,
    )
    check = PlaceCheck(
        options=options,
        hostile=hostile_in,
        ledger=ledger if remember else None,
        stores=stores,
        work=Work.of(jobs, limit_rate, on.counter),
        watcher=on,
    )
    _begin(check, on)
    if not isinstance(checkpoint, str):
        held = opened(checkpoint, stores, also=also)
        if division.asked:
            return _divided(held, check, division, on)
        return check.checkpoint(held)
    try:
        target = open_target(checkpoint, stores, on, also=also)
    except (CorruptError, UnsafeError) as error:
        return check.unopened(error, checkpoint)
    if not division.asked:
        return check.target(target, everything=all_)
    return _verify_part(target, check, division, on)


def _trusted(
    signature: str,
    public_key: str,
    chain: Sequence[str],
    identity: str,
    provider: str,
    stores: StoreOptions,
) -> Trust:
    """Return whose signature is accepted; the keys are read, and the checkpoint is not.

    Raises:
        UsageError: it is not said whose, or of which signature.
        MissingPackageError: what checks signatures is not installed.
    """
    from ftckpt.manifest.signature import Trust

    if not signature:
        raise UsageError("--public-key, --certificate-chain and --identity go with --signature")
    trust = Trust(
        place=signature, public_key=public_key, chain=chain,
        identity=identity, provider=provider, stores=stores,
    )  # fmt: skip
    trust.require()
    return trust


def _begin(check: PlaceCheck, on: Observer) -> None:
    """Tell what the answer holds in any case."""
    on.report(
        level=check.options.level, evidence="none", strict=check.strict, bytes_read=0, seconds=0.0,
        findings=[],
    )  # fmt: skip


def _verify_part(
    target: Target, check: PlaceCheck, division: Machines, on: Observer
) -> PlaceReport:
    """Do a part of a check, or finish it; what no part can open is the whole answer at once."""
    try:
        held = open_from(target, on)
    except (UsageError, NotFoundError):
        raise
    except FtckptError:
        return check.target(target)
    return _divided(held, check, division, on)


def _divided(held: Checkpoint, check: PlaceCheck, division: Machines, on: Observer) -> PlaceReport:
    from ftckpt.manifest.locate import find
    from ftckpt.parts.plan import identity_of, names_of, plan_of
    from ftckpt.verification import verify as verified

    from .many.run import Divided, errors_of

    options = check.options
    sealed = options.manifest
    with suppress(FtckptError):  # the check reports it
        sealed = sealed or find(held.source)
    others = [] if options.against is None else [options.against]
    flags = {
        "level": options.level.value,
        "require": options.require_content,
        "strict": sorted(options.strict),
        "sample": options.sample,
        "against": [identity_of(one.source) for one in others],
        "given": options.manifest is not None,
    }

    def share(work: Work) -> tuple[Sequence[Finding], int]:
        report = verified(held, options, work=work, emit=errors_of(on))
        return report.findings, report.bytes_read

    def whole(work: Work) -> PlaceReport:
        return replace(check, work=work).checkpoint(held)

    session = Session("verify", division, check.stores, on)
    plan = plan_of(held, "verify", flags, *others, sealed=sealed)
    names = names_of(held, sealed)
    done: PlaceReport = Divided(session, held, plan, names, check.work, share, whole).run()
    return done


@operation(
    examples=(
        ("ftckpt scrub /ckpt/run7 --budget 1h", "every night: each in its turn"),
        ("ftckpt scrub s3://run7/ckpt --limit-rate 200MiB/s", "all of it, beside a trainer"),
        (
            "ftckpt scrub /ckpt/run7 --on-alert 'mail -s scrub oncall@example.org'",
            "tell somebody once of what is damaged",
        ),
    ),
    codes={
        ExitCode.OK: "what was read passed, and nothing is known to be bad",
        ExitCode.CORRUPT: "proven damage, found now or by an earlier run and unchanged since",
        ExitCode.INCOMPLETE: "parts missing, or changed meanwhile",
        ExitCode.UNVERIFIED: "--level content, and no evidence covers one",
        ExitCode.UNSAFE: "hostile or ambiguous content; or the root's .ftckpt is a link",
        ExitCode.NOT_FOUND: "no such root, or no checkpoint in it",
        ExitCode.UNAVAILABLE: "",
        ExitCode.DENIED: "credentials, or verdicts cannot be written: --ledger DIR",
        ExitCode.NO_RESOURCE: "",
        ExitCode.UNSUPPORTED: "one is recognised, but not readable by this version",
    },
    everyday=("--budget", "--level", "--limit-rate", "--on-alert", "--alert-url"),
)
def scrub(
    root: Annotated[str, argument("ROOT", "Directory or URL that holds the checkpoints.")],
    *,
    budget: Annotated[
        amounts.Duration, option("TIME", "Begin no further checkpoint after it: 1h.")
    ] = "",
    level: _Depth = Level.AUTO,
    strict: _Strict = (),
    ledger: _Ledger = "",
    jobs: Jobs = 0,
    limit_rate: Rate = "",
    max_memory: Memory = "1GiB",
    stores: StoreOptions = STORES,
    on: Observer = SILENT,
) -> PlaceReport:
    """Check a root's checkpoints in turn, the longest unread first.

    The first is always read, a further one only if the time that is left is enough for it. One that
    was saved again counts as never read, and what `latest`, `guard` or `gc` have read counts as
    read. One that an earlier run found bad makes every run end with its code, until it changes.

    Returns:
        The verdict; `checkpoints` are those that were read or are known to be bad, and `scrub` says
        how far the scrub has come.

    Raises:
        NotFoundError, UsageError: no such root, or it is one checkpoint.
        DeniedError: nothing can be remembered, so nothing is read.
        UnavailableError, NoResourceError: the check could not be made.
    """
    from ftckpt.formats.unsupported import hostile_in
    from ftckpt.verification import VerifyOptions
    from ftckpt.verification.places import PlaceCheck
    from ftckpt.verification.scrub import Scrub

    depth = chosen(Level, level, "--level")
    left = amounts.seconds(budget, "--budget") if budget != "" else None
    if left is not None and left <= 0:
        raise UsageError("--budget must be more than nothing")
    check = PlaceCheck(
        options=VerifyOptions(level=depth, strict=parse_strictness(strict)),
        hostile=hostile_in,
        ledger=ledger,
        stores=stores,
        work=Work.of(jobs, limit_rate, on.counter),
        watcher=on,
    )
    _begin(check, on)
    try:
        target = open_target(root, stores, on)
    except (CorruptError, UnsafeError) as error:
        return check.unopened(error, root)
    return check.target(target, scrub=Scrub(left, stores, ledger))


@dataclass(frozen=True)
class SealedFiles:
    """Files under a manifest.

    Attributes:
        count: number of them.
        bytes: of all.
    """

    count: Natural
    bytes: Natural


@dataclass(frozen=True, kw_only=True)
class SealedCheckpoint:
    """What was sealed.

    Attributes:
        step: by content.
        findings: of the check before.
        manifest: path or URL of it.
        written: False if an equal one stood there.
        files: under it.
        checks: which passed.
        bytes_read: that were hashed.
        sha256: path or URL of the list of SHA-256; "" where none was asked for.
        signature: path or URL of the signature; "" where none was asked for.
        content: the manifest.
        verdict: of the check before.
    """

    step: int | None
    findings: tuple[Finding, ...]
    manifest: str
    written: bool
    files: SealedFiles
    checks: Sequence[PassedCheck]
    bytes_read: Natural
    sha256: str = field(default="", metadata=IF_SOME)
    signature: str = field(default="", metadata=IF_SOME)
    content: Manifest = field(metadata=UNSAID)
    verdict: VerifyReport = field(metadata=UNSAID)


@operation(
    examples=(
        ("ftckpt seal /ckpt/run7/step-1000", "check it, then write ftckpt.manifest.json beside it"),
        ("ftckpt seal s3://run7/ckpt/step-1000", "the same on object storage"),
        ("ftckpt seal /ro/step-9 --manifest /var/seals/step-9.json", "keep the manifest elsewhere"),
        ("ftckpt seal run/iter_0001000 --integrity", "for Megatron's --verify-integrity too"),
        ("ftckpt seal model/ --sign --private-key lab.pem", "and sign it, as model-signing does"),
        ("ftckpt seal model/ --sha256", "and write SHA256SUMS, for sha256sum -c"),
        ("srun ftckpt seal /ckpt/step-9 --part auto --finish-last", "by all nodes of a job"),
    ),
    codes={
        ExitCode.OK: "sealed, or sealed before with the same content",
        ExitCode.CORRUPT: "the check before sealing found damage; nothing was written",
        ExitCode.INCOMPLETE: "not committed, changed meanwhile, or parts missing",
        ExitCode.UNSAFE: "hostile or ambiguous content; nothing was written",
        ExitCode.REFUSED: "another manifest, signature or list stands there, or parts do not fit",
        ExitCode.NOT_FOUND: "no checkpoint there",
        ExitCode.UNAVAILABLE: "",
        ExitCode.DENIED: "the place cannot be written; --manifest names another",
        ExitCode.NO_RESOURCE: "",
        ExitCode.UNSUPPORTED: "",
    },
    everyday=("--level", "--manifest", "--force", "--limit-rate"),
)
def seal(
    checkpoint: Opened,
    *,
    manifest: Annotated[str, option("ELSEWHERE", "Write the manifest to this path or URL.")] = "",
    force: Annotated[
        bool, switch("--force", "Replace a manifest that says something else.")
    ] = False,
    level: Annotated[Level | str, option("", "What to check before sealing.")] = Level.AUTO,
    integrity: Annotated[
        bool, switch("--integrity", "Write Megatron's integrity.json (SHA-256) too.")
    ] = False,
    sha256: Annotated[
        str,
        option(
            "[=FILE]",
            "Write the SHA-256 of every file too, from the same reading: SHA256SUMS.",
            bare="beside",
        ),
    ] = "",
    sign: Annotated[
        str,
        option(
            "[=FILE]",
            "Sign every file of the folder (OpenSSF model signing), last: model.sig in it.",
            bare="beside",
            under=_SIGNATURE,
        ),
    ] = "",
    private_key: Annotated[
        str, option("KEY", "Sign with this elliptic curve key in PEM.", under=_SIGNATURE)
    ] = "",
    signing_certificate: Annotated[
        str, option("CERT", "The certificate of that key, in PEM.", under=_SIGNATURE)
    ] = "",
    certificate_chain: _Chain = (),
    sigstore: Annotated[
        bool,
        switch(
            "--sigstore",
            "Sign with this process's identity by Sigstore; needs the network.",
            under=_SIGNATURE,
        ),
    ] = False,
    jobs: Jobs = 0,
    limit_rate: Rate = "",
    max_memory: Memory = "1GiB",
    division: Machines = ALONE,
    stores: StoreOptions = STORES,
    on: Observer = SILENT,
) -> SealedCheckpoint:
    """Record digests of a checkpoint, so that a later change is found.

    The checkpoint is verified first and a damaged one is not sealed. The manifest is written last
    and at once. Sealing does not prove the checkpoint good: the manifest says which checks passed.
    A signature (--sign) comes after it, and says who vouches for all files of the folder.

    Raises:
        CorruptError, UnsafeError, UnverifiedError: it does not pass, and is not sealed.
        IncompleteError: not committed, or a file changed meanwhile.
        RefusedError: another manifest, or a shorter `integrity.json`, stands there.
        UsageError: a root; or `integrity`, and it is not of Megatron's `torch_dist`; or a key that
            cannot be used.
        DeniedError: the place cannot be written.
        MissingPackageError: `sign`, and model-signing is not installed.
        UnavailableError: Sigstore cannot be reached; the manifest is written then.
    """
    from ftckpt.manifest.seal import hash_share, locate
    from ftckpt.parts.plan import names_of, plan_of
    from ftckpt.storage import open_store
    from ftckpt.verification import VerifyOptions
    from ftckpt.verification import verify as verified

    here = open_store(manifest, stores).local_path() if manifest else None
    if here is not None:
        from ftckpt.storage.local.writable import check_file

        check_file("--manifest", here)
    work = Work.of(jobs, limit_rate, on.counter)
    held = opened(checkpoint, stores, on)
    place = locate(manifest, held.source.name, stores) if manifest else None
    # An old manifest is not evidence here: whether the content still fits it is for `seal` to say.
    options = VerifyOptions(level=chosen(Level, level, "--level"), use_manifest=False)
    if integrity:
        from ftckpt.formats.dcp.integrity import require_checked

        require_checked(held.format)
    for said, given in (("--integrity", integrity), ("--sha256", sha256), ("--sign", sign)):
        if given and division.asked:
            hint = f"seal with {said} in one process"
            raise UsageError(f"{said} is not divided into parts", hint=hint)
    more = None
    if sha256 or sign or private_key or signing_certificate or certificate_chain or sigstore:
        from .signing import Signing

        more = Signing(
            sums=sha256, signature=sign, private_key=private_key, sigstore=sigstore,
            certificate=signing_certificate, chain=certificate_chain, force=force, stores=stores,
        ).begun(held.source)  # fmt: skip

    def whole(work: Work) -> SealedCheckpoint:
        return _sealed(
            held, options, place, work, stores, on, force=force, integrity=integrity, more=more
        )

    if not division.asked:
        return whole(work)
    from .many.run import Divided, errors_of

    def share(work: Work) -> tuple[Sequence[Finding], int]:
        report = verified(held, options, work=work, emit=errors_of(on))
        return report.findings, report.bytes_read + hash_share(held, place=place, work=work)

    plan = plan_of(held, "seal", {"level": options.level.value})
    session = Session("seal", division, stores, on)
    done: SealedCheckpoint = Divided(session, held, plan, names_of(held), work, share, whole).run()
    return done


def _sealed(
    held: Checkpoint,
    options: VerifyOptions,
    place: tuple[Store, str] | None,
    work: Work,
    stores: StoreOptions,
    on: Observer,
    *,
    force: bool,
    integrity: bool,
    more: Signing | None,
) -> SealedCheckpoint:
    """Check and seal a checkpoint, and sign it."""
    from ftckpt.manifest import PassedCheck
    from ftckpt.manifest import seal as sealing
    from ftckpt.verification.while_hashing import hash_members, verify_while_hashing

    checked = verify_while_hashing(held, options, work=work, sha256=more is not None)
    report = checked.report
    on.report(step=held.known_step, findings=report.findings)
    if report.code is not ExitCode.OK:
        for found in report.findings:
            on.found(found)
        hint = report.hint or "ftckpt verify PATH"
        raise error_of(report.code, f"not sealed: {report.message}", hint=hint)
    checks = [PassedCheck(report.level, report.evidence, sealing.utc_now())]
    if integrity:
        listed, replaces = _record_integrity(held, checks, stores, work, beside=place is None)
        force |= replaces
        if listed is not held:
            held, checked = listed, checked.of_another_listing()
    if more is not None and not checked.digests:
        digests, sha256 = hash_members(held, work, sha256=True)
        checked = checked._replace(digests=digests, sha256=sha256)
    sealed = sealing.seal(
        held, place=place, force=force, checks=checks, known=checked.digests, work=work
    )
    sums, signature = ("", "") if more is None else more.made(held, checked.sha256, work)
    if place is None and not work.partial:  # else nothing was to be written beside the data
        _remember_seal(held, options, report, stores)
    files = sealed.manifest.files
    return SealedCheckpoint(
        step=held.known_step,
        findings=report.findings,
        manifest=sealed.url,
        written=sealed.written,
        files=SealedFiles(len(files), sum(f.size for f in files)),
        checks=sealed.manifest.checks,
        bytes_read=sealed.bytes_read + checked.nbytes,
        sha256=sums,
        signature=signature,
        content=sealed.manifest,
        verdict=report,
    )


def _record_integrity(
    target: Checkpoint,
    checks: Sequence[PassedCheck],
    stores: StoreOptions,
    work: Work,
    *,
    beside: bool,
) -> tuple[Checkpoint, bool]:
    """Write Megatron's `integrity.json`; return the checkpoint that has it.

    Where it is sealed already, its manifest is first held to the content as it is, so that nothing
    is added to a checkpoint whose manifest says something else. Then it may be replaced.

    Returns:
        The checkpoint, and whether the manifest beside it lacks the record alone.

    Raises:
        RefusedError: its manifest is of other content, or a record of fewer files stands there.
    """
    from ftckpt.formats.dcp.integrity import write_integrity
    from ftckpt.manifest.seal import seal

    sealed_before = beside and MANIFEST in target.source.entries
    if sealed_before:
        seal(target, checks=checks, work=work)
    written = write_integrity(target.source, work=work)
    return (opened(target.source.url, stores) if written else target), sealed_before and written


def _remember_seal(
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
