"""What changed between two checkpoints: `diff`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from ftckpt.errors import ExitCode, NotFoundError
from ftckpt.findings import listed
from ftckpt.observer import SILENT, Observer
from ftckpt.storage import StoreOptions
from ftckpt.workers import Work

from .definition import argument, operation, option, switch
from .many import ALONE, Machines, Session
from .opening import STORES, Jobs, Memory, Rate, opened
from .tables import RulesFile, read_renames, read_rules, read_text

if TYPE_CHECKING:
    from ftckpt.checkpoint import Checkpoint
    from ftckpt.comparison import DiffReport
    from ftckpt.findings import Finding

_First = Annotated[
    "Checkpoint | str", argument("A", "The first checkpoint: path, URL or ROOT@STEP.")
]
_Second = Annotated["Checkpoint | str", argument("B", "The second; of any format and topology.")]


@operation(
    examples=(
        ("ftckpt diff run/step-1000 run/step-2000", "what a thousand steps changed"),
        (
            "ftckpt diff run/step-1000 run-64/step-1000 --top 0",
            "the same? 0: yes",
        ),
        (
            "ftckpt diff s3://run7/ckpt@900 s3://run7/ckpt@1000 --component model",
            "the weights alone",
        ),
        (
            "ftckpt diff hf/ iter_0001000 --rename names.toml --rtol 1e-2 --atol 1e-5",
            "by tolerances",
        ),
        (
            "ftckpt diff A B --tensor '*.q_proj.*' --plot change.svg",
            "with a heat map",
        ),
        (
            "ftckpt diff tp8/ tp4/ --rules mine.toml",
            "shards saved by hand",
        ),
        ("ftckpt diff A B --trust-recorded", "quickly, by what the files say about themselves"),
        ("srun ftckpt diff A B --part auto --finish-last", "by all nodes of a job"),
    ),
    codes={
        ExitCode.OK: "equal: every tensor and field that was asked for, or within the tolerances",
        ExitCode.DIFFERENT: "different; or one has what the other lacks",
        ExitCode.CORRUPT: "damage, or what cannot be read; the rest was compared",
        ExitCode.INCOMPLETE: "not committed, or changed while it was being read; parts missing",
        ExitCode.UNSAFE: "hostile or ambiguous content; nothing was executed",
        ExitCode.REFUSED: "parts do not fit together, or a file stands where the numbers would go",
        ExitCode.NOT_FOUND: "no checkpoint there, or nothing of the component or name asked for",
        ExitCode.UNAVAILABLE: "",
        ExitCode.DENIED: "",
        ExitCode.NO_RESOURCE: "",
        ExitCode.UNSUPPORTED: "a format, or a type of tensor, that cannot be compared",
    },
    everyday=("--component", "--tensor", "--stat", "--top", "--rtol", "--atol"),
)
def diff(
    a: _First,
    b: _Second,
    *,
    component: Annotated[
        Sequence[str], option("NAME", "model, optimizer, exp_avg, …, state. Repeatable.")
    ] = (),
    tensor: Annotated[
        Sequence[str], option("GLOB", "Only tensors of this name, `*` any text. Repeatable.")
    ] = (),
    rtol: Annotated[float | None, option("X", "Close is |a-b| <= atol + rtol*|b|.", min=0)] = None,
    atol: Annotated[float | None, option("X", "See --rtol; without both: bits.", min=0)] = None,
    rename: Annotated[str, option("FILE.toml", "Other names for the parameters of A.")] = "",
    rules: RulesFile = "",
    true_vocab_size: Annotated[
        int | None, option("N", "Rows of the vocabulary, no padding.", min=1)
    ] = None,
    layout_state: Annotated[
        bool, switch("--layout-state", "State that follows the grid of ranks counts too.")
    ] = False,
    trust_recorded: Annotated[
        bool, switch("--trust-recorded", "Do not read what recorded digests or CRC-32s call equal.")
    ] = False,
    jobs: Jobs = 0,
    limit_rate: Rate = "",
    max_memory: Memory = "1GiB",
    division: Machines = ALONE,
    stores: StoreOptions = STORES,
    on: Observer = SILENT,
) -> DiffReport:
    """Show what changed between two checkpoints of any formats.

    Tensors are aligned by name and compared bit by bit: changed elements, largest difference,
    relative L2, cosine, units in the last place, NaN. Other state is compared field by field. All
    of both is read, and a record that does not match the CRC-32 in its file is damage (4).
    State that says or follows the grid of ranks is shown apart, and is not a difference.

    Raises:
        NotFoundError, UsageError: a path names no checkpoint, or nothing is of the choice.
        UnavailableError, DeniedError, NoResourceError: they could not be compared.
    """
    from ftckpt.comparison import Choice, Reading, compare, compare_share
    from ftckpt.comparison.arithmetic import tolerance_of
    from ftckpt.comparison.read import within_budget
    from ftckpt.formats.families.vocabulary import vocabulary_of
    from ftckpt.formats.grid_fields import follows
    from ftckpt.formats.huggingface.model_settings import with_settings
    from ftckpt.formats.state.fields import state_fields
    from ftckpt.transfer.content import Content
    from ftckpt.transfer.request.renaming import rename as renamed

    tolerance, renames, table = tolerance_of(rtol, atol), read_renames(rename), read_rules(rules)
    first = opened(a, stores, on, rules=table)
    second = opened(b, stores, rules=table)
    if on is not SILENT:  # finding a step may read files
        _tell_sides(first, second, on)
    on.report(tolerance=tolerance, trust_recorded=trust_recorded)
    ours = Content.of(first)
    one, two = renamed(ours, renames) if renames else ours, Content.of(second)
    reading = Reading(tolerance=tolerance, trust_recorded=trust_recorded)
    vocabulary = vocabulary_of(first, second, true_vocab_size)
    choice = Choice(tuple(component), tuple(tensor), layout_state)
    work = within_budget(Work.of(jobs, limit_rate, on.counter), (first, second))

    def whole(work: Work) -> DiffReport:
        report = compare(
            one, two, reading, fields=with_settings(state_fields, first, second), hangs=follows,
            vocabulary=vocabulary, choice=choice, work=work,
        )  # fmt: skip
        if component and not (report.total.tensors or report.state_fields or report.findings):
            both = f"neither {first.source.url} nor {second.source.url}"
            raise NotFoundError(f"{both} has anything of {listed(list(component))}")
        return report

    def share(work: Work) -> tuple[Sequence[Finding], int]:
        return compare_share(one, two, reading, vocabulary=vocabulary, choice=choice, work=work)

    if not division.asked:
        return whole(work)
    from ftckpt.parts.plan import names_of, plan_of

    from .many.run import Divided

    flags = {
        "component": list(component),
        "tensor": list(tensor),
        "tolerance": tolerance,
        "rename": read_text(rename) if rename else "",
        "rules": [] if table is None else [(p.pattern, repr(r)) for p, r in table.rules],
        "true_vocab_size": true_vocab_size,
        "trust_recorded": trust_recorded,
    }
    plan = plan_of(first, "diff", flags, second)
    session = Session("diff", division, stores, on)
    done: DiffReport = Divided(session, first, plan, names_of(first), work, share, whole).run()
    return done


def _tell_sides(first: Checkpoint, second: Checkpoint, on: Observer) -> None:
    sides = [
        {"target": one.source.url, "format": one.format, "step": one.known_step}
        for one in (first, second)
    ]
    on.report(**sides[0], other=sides[1])
