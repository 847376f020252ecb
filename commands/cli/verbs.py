"""The verbs: found by name, imported on demand, given the options that every verb has.

A verb is imported when it runs or when its own help is asked for, so that `ftckpt --help` starts as
fast as Python does. A verb of two words (`plan sweep`) is a verb like any other: the command line
is matched against two words first.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Annotated, Any, NamedTuple, cast, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from ftckpt.commands.cli.parameters import option, switch
from ftckpt.storage.options import StoreOptions
from ftckpt.storage.settings import read_settings

from .codes import ALWAYS, MEANINGS
from .environment import NO_ENVIRONMENT, environment_flags, environment_name, refuse_unknown
from .invocation import Invocation, ProgressChoice
from .parameters import lighten

# Summaries stand here so that the list of verbs needs no verb; a test holds them to the modules.
VERBS: dict[str, str] = {
    "inspect": "Show what a checkpoint holds, from headers alone",
    "ls": "List the checkpoints of a root: step, age, size, class, verified or not, pins",
    "du": "Show where a checkpoint's bytes are, by component and layer",
    "cat": "Print a tensor, a part of it, or other state, reading only what that needs",
    "verify": "Check a checkpoint, and name the evidence for the verdict",
    "seal": "Record digests of a checkpoint, so that any later change is found",
    "latest": "Print the newest checkpoint that passes",
    "promote": "Point a root at a checkpoint, after verifying it",
    "restart": "Print a checkpoint that a job of N ranks loads: find, check, reshard if needed",
    "reshard": "Write a checkpoint for another number of ranks, optimizer included",
    "convert": "Write a checkpoint in another format: whole, or one part of it",
    "families": "List the tables of model families, or check one against a model",
    "copy": "Copy a checkpoint between tiers: verified on the way, resumable, visible at the end",
    "sync": "Ship the checkpoints of a root to another tier, the oldest missing one first",
    "repair": "Repair a damaged checkpoint with the blocks of a replica",
    "diff": "Show what changed between two checkpoints, of any formats and topologies",
    "gc": "Drop the checkpoints that no rule keeps: shows a plan, and --apply carries it out",
    "gc undelete": "Restore checkpoints from the trash (without a name: list it)",
    "gc purge": "Free the space of trash that is old enough",
    "pin": "Keep a checkpoint until it is unpinned, against all retention rules",
    "unpin": "Unpin a checkpoint, so that retention rules apply to it again",
    "pins": "List the pins and tags of a root",
    "tag": "Tag a checkpoint, for example to keep it with gc --keep-tag",
    "untag": "Remove tags from a checkpoint, so that retention rules apply to it again",
    "delta pack": "Write a checkpoint as its difference from another one, or compressed whole",
    "delta unpack": "Write a delta as a full checkpoint, every tensor proven by its digest",
    "delta info": "Show a delta's content, its chain of bases, and the cost of a restore",
    "delta rebase": "Rewrite a delta against another base, or none; every bit stays",
    "plan": "Compute how often to save, what it costs, and what to improve first",
    "plan sweep": "Plan over a range of cluster sizes, save times or failure rates",
    "plan elastic": "Compute batch, accumulation and learning rate for fewer or more GPUs",
    "plan compress": "Compute whether compressing a checkpoint makes the save shorter",
    "plan risk": "Compute how likely a run is to fail, and its time without checkpoints",
    "status": "Show a run's checkpoint health: newest saves, age, cadence, size, alerts",
    "incidents": "Show what failed, how often and where, from job logs, sacct and the guard's log",
    "guard": "Start a job from its newest good checkpoint, watch it, and restart it",
    "replay run": "Run a training and its restart, and compare them bit by bit",
    "replay compare": "Compare the logs of runs, and name the first event that differs",
    "replay audit": "Report what a restart from a checkpoint would lack, without running it",
    "doctor": "Show what this machine and a place can do, and what to do about the rest",
    "demo": "Make a small real checkpoint, damage it, and walk through the incident",
    "completions": "Print the completion script of a shell",
    "config": "Show which settings are active, and where each comes from",
    "help": "Explain exit codes, the environment, or a verb",
}

# The next run of the same command continues what a killed run of these has done.
RESUMABLE = frozenset(
    {"restart", "reshard", "convert", "copy", "sync", "repair"}
    | {"delta pack", "delta unpack", "delta rebase"}
)

HELP = ("--help", "-h")
# Where a verb is as like a word as this, those that are less like it are not meant.
_ALIKE = 0.75
# What other tools call it. The command line says which of several was meant.
_MEANT = {
    "restore": ("restart", "delta unpack", "repair", "gc undelete"),
    "resume": ("restart", "latest"),
    "undo": ("gc undelete",),
    "list": ("inspect", "status"),
    "show": ("inspect",),
    "info": ("inspect", "delta info"),
    "check": ("verify",),
    "validate": ("verify",),
    "compare": ("diff",),
    "merge": ("convert",),
    "export": ("convert",),
    "cp": ("copy",),
    "rm": ("gc",),
    "delete": ("gc",),
    "prune": ("gc",),
    "forget": ("gc",),
}


def _common(
    json: Annotated[
        bool, switch("--json", "Print one JSON document on stdout, errors included.")
    ] = False,
    quiet: Annotated[
        bool,
        typer.Option("--quiet", "-q", help="No progress and no remarks on stderr; warnings stay."),
    ] = False,
    progress: Annotated[
        ProgressChoice,
        typer.Option(help="auto: a bar, or a line now and then; json: a record a second."),
    ] = ProgressChoice.AUTO,
    debug: Annotated[bool, switch("--debug", "Show tracebacks.")] = False,
) -> None:
    """Options of every verb."""


def _storage(
    endpoint: Annotated[str, option("URL", "S3-compatible service (AWS_ENDPOINT_URL).")] = "",
    profile: Annotated[str, option("NAME", "Profile of the AWS configuration.")] = "",
    region: Annotated[str, option("NAME", "Region of the bucket.")] = "",
    requester_pays: Annotated[
        bool, switch("--requester-pays", "Pay for requests to another owner's bucket.")
    ] = False,
    anonymous: Annotated[bool, switch("--anonymous", "Send no credentials.")] = False,
    retry_seconds: Annotated[
        float, option("S", "Retry one request for this long.", min=0)
    ] = StoreOptions().retry_seconds,
) -> None:
    """Options of every verb that opens a place."""


# Names of the options that every verb has, and every verb that opens a place.
COMMON = set(_common.__annotations__) - {"return"}
STORAGE = set(_storage.__annotations__) - {"return"}


def _evaluated(of: Any) -> Any:
    """Evaluate the annotations of a function or dataclass once: typer does it four times."""
    hints = get_type_hints(of, include_extras=True)
    for one in (of, vars(of)["__init__"]) if isinstance(of, type) else (of,):
        one.__annotations__ = {name: hints[name] for name in one.__annotations__ if name in hints}
    return of


def _parameters(function: Any) -> list[Any]:
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(_evaluated(function))
    return typer.main.get_command(app).params


class OptionGroup(NamedTuple):
    """Options that several verbs share, under a heading of their own in the help.

    Attributes:
        type: the dataclass whose fields are the options.
        names: of its fields.
        build: makes an instance from the parsed values.
    """

    type: type[Any]
    names: frozenset[str]
    build: Callable[..., Any]


class Verb(TyperCommand):
    """A verb with the options that every verb has, its examples and its exit codes."""

    module: Any = None
    groups: Sequence[OptionGroup] = ()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line; an option that the module's `BARE` names may lack its value.

        Such a value is joined by `=`: a word that follows is not a value of it.
        """
        bare: dict[str, str] = getattr(self.module, "BARE", {})
        end = args.index("--") if "--" in args else len(args)
        # `help` and `completions` must answer with a wrong file too, and `config` names the line.
        settled = ctx.resilient_parsing or ctx.default_map is not None
        if not settled and getattr(self.module, "STORAGE", True) and not {*HELP} & {*args[:end]}:
            ctx.default_map = _settled(str(self.name))
        given = [f"{word}={bare[word]}" if word in bare else word for word in args[:end]]
        return super().parse_args(ctx, [*given, *args[end:]])

    def invoke(self, ctx: Any) -> Any:
        """Run the verb with an `Invocation` as the context's object."""
        device = ctx.params.get("device")
        common = {k: ctx.params.pop(k) for k in COMMON & ctx.params.keys()}
        storage = {k: ctx.params.pop(k) for k in STORAGE & ctx.params.keys()}
        invocation = cast(Invocation, ctx.find_root().obj)
        invocation.json |= common["json"]
        invocation.quiet |= common["quiet"]
        invocation.debug |= common["debug"]
        invocation.progress = common["progress"]
        invocation.stores = StoreOptions(**storage)
        invocation.environment = environment_flags(ctx)
        invocation.settings = {
            name: value
            for name, value in (ctx.default_map or {}).items()
            if (source := ctx.get_parameter_source(name)) and source.name == "DEFAULT_MAP"
        }
        for group in self.groups:
            values = {k: ctx.params.pop(k) for k in group.names}
            invocation.groups[group.type] = group.build(**values)
        # A verb that passes signals on to a command ends after it, in its own time.
        invocation.begin(watched=getattr(self.module, "WATCHED", True))
        ctx.obj = invocation
        # `help` and `completions` must answer so that the right name can be found.
        if getattr(self.module, "STORAGE", True) and any(
            n.startswith("FTCKPT_") for n in os.environ
        ):
            refuse_unknown(VERBS, load)
        if device not in (None, "cpu", "auto"):
            from ftckpt.transfer.device import torch_device

            torch_device(device)  # before anything is read
        return super().invoke(ctx)

    def get_help_option(self, ctx: Any) -> Any:
        """Return `--help`."""
        return lighten(super().get_help_option(ctx))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, the verb's own options, then those of every verb."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                sections.setdefault(self.section_of(param), []).append(record)
        for name in self.section_names():
            if name in sections:
                with formatter.section(name):
                    formatter.write_dl(sections[name])

    def section_names(self) -> list[str]:
        """Return the headings of the help in their order; a verb need not have all."""
        own = [str(group.type.TITLE) for group in self.groups]
        return ["Arguments", *own, "Options", "Storage options", "Common options"]

    def section_of(self, param: Any) -> str:
        """Return the heading that a parameter stands below."""
        if param.param_type_name == "argument":
            return "Arguments"
        if param.name in STORAGE:
            return "Storage options"
        for group in self.groups:
            if param.name in group.names:
                return str(group.type.TITLE)
        return "Common options" if param.name in COMMON | {"help"} else "Options"

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples and the exit codes."""
        with formatter.section("Examples"):
            for line, does in self.module.EXAMPLES:
                formatter.write(f"  {line}\n      {does}\n")
        rows = dict.fromkeys(ALWAYS, "") | dict(self.module.CODES)
        with formatter.section("Exit codes"):
            formatter.write_dl(
                [(str(int(c)), rows[c] or MEANINGS[c].meaning) for c in sorted(rows)], col_max=6
            )


class Verbs(TyperGroup):
    """All verbs, each imported on demand."""

    def get_help_option(self, ctx: Any) -> Any:
        """Return `--help`."""
        return lighten(super().get_help_option(ctx))

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the verbs in the order of the help."""
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import a verb; None for an unknown name."""
        return load(cmd_name) if cmd_name in VERBS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the verb that the command line names, or suggest what was meant."""
        if " ".join(args[:2]) in VERBS:
            args = [" ".join(args[:2]), *args[2:]]
        name = args[0]
        if name not in VERBS and not name.startswith("-"):
            known = family(name)
            if known:
                ctx.fail(f"{name} is several verbs: {', '.join(known)}")
            near = _near(name)
            meant = f"; did you mean {' or '.join(near)}?" if near else ""
            ctx.fail(f"unknown verb {name!r}{meant}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the verbs from the static table."""
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))


def family(first: str) -> list[str]:
    """Return the verbs that begin with a word: `delta pack` and its kin for `delta`."""
    return [verb for verb in VERBS if verb.partition(" ")[0] == first]


def _near(name: str) -> list[str]:
    """Return the verbs that a word may mean: the second of two (`undelete`), or one mistyped."""
    if name in _MEANT:
        return list(_MEANT[name])
    known: dict[str, list[str]] = {}
    for verb in VERBS:
        for word in dict.fromkeys((verb.partition(" ")[0], verb.rpartition(" ")[2])):
            known.setdefault(word, []).append(verb)
    if name in known:
        return known[name]
    near = get_close_matches(name, known, cutoff=_ALIKE) or get_close_matches(name, known)
    return list(dict.fromkeys(verb for word in near for verb in known[word]))


def load(verb: str) -> Verb:
    """Import a verb's module and return its command."""
    module = import_module(f"ftckpt.commands.{verb.replace(' ', '.')}")
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    settings = {"help_option_names": list(HELP)} | getattr(module, "CONTEXT", {})
    app.command(name=verb, cls=Verb, context_settings=settings)(_evaluated(module.command))
    command = cast(Verb, typer.main.get_command(app))
    command.module = module
    command.groups = [_group(one, command) for one in getattr(module, "OPTIONS", ())]
    if getattr(module, "STORAGE", True):
        command.params += _parameters(_storage)
    command.params += _parameters(_common)
    for param in map(lighten, command.params):
        if isinstance(param, TyperOption):
            param.show_envvar = False  # one rule for all, told by `ftckpt help environment`
            if param.name not in NO_ENVIRONMENT:
                param.envvar = environment_name(verb, param.opts)
    return command


def _settled(verb: str) -> dict[str, Any]:
    """Return what the user's file of settings has for the options of a verb."""
    if not read_settings().tables:
        return {}
    from ftckpt.commands.config.defaults import defaults_of

    return defaults_of(verb, VERBS)


def _group(of: type[Any], command: Verb) -> OptionGroup:
    """Add the fields of a dataclass to a verb's options."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(_evaluated(of))
    made = typer.main.get_command(app)
    command.params += made.params
    return OptionGroup(of, frozenset(str(p.name) for p in made.params), cast(Any, made.callback))
