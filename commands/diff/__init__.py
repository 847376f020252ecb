"""`ftckpt diff`: what changed between two checkpoints?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from ftckpt.commands.cli.bounds import (
    JobsOption,
    MemoryOption,
    RateOption,
    bound_memory,
)
from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.target import open_checkpoint
from ftckpt.commands.cli.transfer_options import RulesOption, read_rules, read_text
from ftckpt.errors import ExitCode, NotFoundError
from ftckpt.findings import listed
from ftckpt.operations.definition import argument, option, switch
from ftckpt.operations.many import Machines

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ftckpt.checkpoint import Checkpoint
    from ftckpt.checkpoint.rules import Rules
    from ftckpt.comparison import DiffReport, Tolerance
    from ftckpt.findings import Finding
    from ftckpt.workers import Work

OPTIONS = (Machines,)
EXAMPLES = (
    ("ftckpt diff run/step-1000 run/step-2000", "what a thousand steps changed"),
    ("ftckpt diff run/step-1000 run-64/step-1000 --stat", "is the resharded copy the same? 0: yes"),
    ("ftckpt diff s3://run7/ckpt@900 s3://run7/ckpt@1000 --component model", "the weights alone"),
    ("ftckpt diff hf/ iter_0001000 --rename names.toml --rtol 1e-2 --atol 1e-5", "by tolerances"),
    ("ftckpt diff A B --tensor '*.q_proj.*' --plot change.svg", "some tensors, with a heat map"),
    ("ftckpt diff tp8/ tp4/ --rules mine.toml", "shards saved by hand, merged by a table of rules"),
    ("ftckpt diff A B --trust-recorded", "quickly, by what the files say about themselves"),
    ("srun ftckpt diff A B --part auto --finish-last", "by all nodes of a job"),
)
CODES = {
    ExitCode.OK: "equal: every tensor and field that was asked for, or within the tolerances",
    ExitCode.DIFFERENT: "different; or one has what the other lacks",
    ExitCode.CORRUPT: "damage in what was compared, or what cannot be read; the rest was compared",
    ExitCode.INCOMPLETE: "not committed, or changed while it was being read; parts missing",
    ExitCode.UNSAFE: "hostile or ambiguous content; nothing was executed",
    ExitCode.REFUSED: "parts do not fit together, or a file stands where the numbers would go",
    ExitCode.NOT_FOUND: "no checkpoint there, or nothing of the component or name asked for",
    ExitCode.UNAVAILABLE: "",
    ExitCode.DENIED: "",
    ExitCode.NO_RESOURCE: "",
    ExitCode.UNSUPPORTED: "a format, or a type of tensor, that cannot be compared",
}

_First = Annotated[str, argument("A", "The first checkpoint: path, URL or ROOT@STEP.")]
_Second = Annotated[str, argument("B", "The second; of any format and topology.")]


def command(
    invocation: Invocation,
    a: _First,
    b: _Second,
    component: Annotated[
        list[str] | None, option("NAME", "model, optimizer, exp_avg, …, state. Repeatable.")
    ] = None,
    tensor: Annotated[
        list[str] | None, option("GLOB", "Only tensors of this name, `*` any text. Repeatable.")
    ] = None,
    stat: Annotated[bool, switch("--stat", "Sums alone, no single tensor.")] = False,
    top: Annotated[int, option("N", "Tensors shown, by relative change.", min=0)] = 20,
    rtol: Annotated[float | None, option("X", "Close is |a-b| <= atol + rtol*|b|.", min=0)] = None,
    atol: Annotated[float | None, option("X", "See --rtol; without both: bits.", min=0)] = None,
    rename: Annotated[str, option("FILE.toml", "Other names for the parameters of A.")] = "",
    rules: RulesOption = "",
    true_vocab_size: Annotated[
        int | None, option("N", "Rows of the vocabulary, no padding.", min=1)
    ] = None,
    layout_state: Annotated[
        bool, switch("--layout-state", "State that follows the grid of ranks counts too.")
    ] = False,
    trust_recorded: Annotated[
        bool, switch("--trust-recorded", "Do not read what recorded digests or CRC-32s call equal.")
    ] = False,
    plot: Annotated[str, option("FILE", "A heat map, layer by component: .png, .svg, .html.")] = "",
    jobs: JobsOption = 0,
    limit_rate: RateOption = "",
    max_memory: MemoryOption = "1GiB",
) -> Result:
    """Show what changed between two checkpoints, of any formats and topologies.

    Tensors are aligned by name and compared bit by bit: changed elements, largest difference,
    relative L2, cosine, units in the last place, NaN. Other state is compared field by field. All
    of both is read, and a record that does not match the CRC-32 in its file is damage (4).
    State that says or follows the grid of ranks is shown apart, and is not a difference.
    """
    from ftckpt.comparison import Choice, Reading, compare, compare_share
    from ftckpt.comparison.arithmetic import tolerance_of
    from ftckpt.comparison.worker_count import within_budget
    from ftckpt.formats.families.vocabulary import vocabulary_of
    from ftckpt.formats.grid_fields import follows
    from ftckpt.formats.huggingface.model_settings import with_settings
    from ftckpt.formats.state.fields import state_fields
    from ftckpt.transfer.content import Content
    from ftckpt.transfer.request.renaming import parse_renames
    from ftckpt.transfer.request.renaming import rename as renamed
    from ftckpt.workers import Work

    from .text import verdict

    bound_memory(max_memory)
    if plot:
        from ftckpt.commands.pictures.drawing import check_path

        check_path(plot, terminal=False)
    tolerance = tolerance_of(rtol, atol)
    renames = parse_renames(read_text(rename), rename) if rename else ()
    table = read_rules(rules)
    first, second = _open(invocation, a, table), _open(invocation, b, table)
    _report_sides(invocation, first, second)
    work = Work.of(jobs, limit_rate, invocation.counter)
    ours = Content.of(first)
    one, two = renamed(ours, renames) if renames else ours, Content.of(second)
    reading = Reading(tolerance=tolerance, trust_recorded=trust_recorded)
    vocabulary = vocabulary_of(first, second, true_vocab_size)
    choice = Choice(tuple(component or ()), tuple(tensor or ()), layout_state)
    work = within_budget(work, (first, second))

    def whole(work: Work) -> Result:
        report = compare(
            one, two, reading, fields=with_settings(state_fields, first, second), hangs=follows,
            vocabulary=vocabulary, choice=choice, work=work,
        )  # fmt: skip
        return conclude(report)

    def share(work: Work) -> tuple[Sequence[Finding], int]:
        return compare_share(one, two, reading, vocabulary=vocabulary, choice=choice, work=work)

    def conclude(report: DiffReport) -> Result:
        if component and not (report.total.tensors or report.state_fields or report.findings):
            both = f"neither {first.source.url} nor {second.source.url}"
            raise NotFoundError(f"{both} has anything of {listed(component)}")
        _show(invocation, report, tolerance, top=top, stat=stat, trusted=trust_recorded)
        if plot:
            from .picture import draw

            numbers = draw(report, plot, f"{first.source.name} and {second.source.name}")
            invocation.report(plot={"file": plot, "numbers": numbers})
            invocation.say(f"picture: {plot}, numbers: {numbers}")
        message = verdict(report)
        if report.findings:
            told = report.code in (ExitCode.DENIED, ExitCode.UNAVAILABLE)
            hint = "" if told else "`ftckpt verify` says what is wrong with each"
            return invocation.fail(report.code, message, hint)
        invocation.print(message)
        return Result(report.code, message)

    if not invocation.options(Machines).asked:
        return whole(work)
    flags = {
        "component": component,
        "tensor": tensor,
        "tolerance": tolerance,
        "rename": read_text(rename) if rename else "",
        "rules": [] if table is None else [(p.pattern, repr(r)) for p, r in table.rules],
        "true_vocab_size": true_vocab_size,
        "trust_recorded": trust_recorded,
    }
    return _divided(invocation, first, second, flags, work, share, whole)


def _divided(
    invocation: Invocation,
    first: Checkpoint,
    second: Checkpoint,
    flags: Mapping[str, object],
    work: Work,
    share: Callable[[Work], tuple[Sequence[Finding], int]],
    whole: Callable[[Work], Result],
) -> Result:
    """Compare a share, or finish; a part says nothing of differences, which are no failure."""
    from ftckpt.commands.cli.parts import session_of, shown
    from ftckpt.operations.many.run import Divided
    from ftckpt.parts.plan import names_of, plan_of

    plan = plan_of(first, "diff", flags, second)
    names = names_of(first)
    return shown(
        invocation, Divided(session_of(invocation), first, plan, names, work, share, whole).run()
    )


def _open(invocation: Invocation, path: str, rules: Rules | None) -> Checkpoint:
    return open_checkpoint(invocation, path, newest=False, rules=rules)


def _report_sides(invocation: Invocation, first: Checkpoint, second: Checkpoint) -> None:
    sides = [
        {"target": one.source.url, "format": one.format, "step": one.known_step}
        for one in (first, second)
    ]
    invocation.report(
        target=first.source.url, format=first.format, step=sides[0]["step"], other=sides[1]
    )
    for letter, side in zip("AB", sides, strict=True):
        step = "no step" if side["step"] is None else f"step {side['step']}"
        invocation.print(f"{letter}  {side['target']} ({side['format']}, {step})")


def _show(
    invocation: Invocation, report: DiffReport, tolerance: Tolerance | None, *, top: int,
    stat: bool, trusted: bool,
) -> None:  # fmt: skip
    from .text import text, unread

    invocation.report(
        equal=report.code is ExitCode.OK,
        tolerance=tolerance,
        total=report.total,
        components=report.components,
        layers=report.layers,
        cells=report.cells,
        tensors=() if stat else report.tensors,
        state=report.state,
        state_fields=report.state_fields,
        layout_counts=report.layout_counts,
        evidence=report.evidence,
        trust_recorded=trusted,
        true_vocab_rows=report.true_vocab_rows,
        bytes_read=report.bytes_read,
        seconds=report.seconds,
        findings=report.findings,
    )
    if not invocation.json:
        for line in text(report, tolerance, top=0 if stat else top):
            invocation.print(line)
        for line in unread(report.findings):
            invocation.print(line)
