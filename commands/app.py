"""The typer app; the only place where errors become exit codes.

Verbs are imported when they run or when their own help is asked for, so that `ftckpt --help` starts
as fast as Python does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from typing import Annotated, Any, NamedTuple, NoReturn, cast

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from ftckpt import __version__
from ftckpt.errors import ExitCode, FtckptError
from ftckpt.stores.options import StoreOptions

from .codes import ALWAYS, MEANINGS
from .ending import SignalError, catch_signals, leave
from .invocation import ClosedPipeError, Invocation, Result, complain, unwritable, write
from .render import error_line, json_text, printable, result_record

# Summaries stand here so that the list of verbs needs no verb; a test holds them to the modules.
VERBS: dict[str, str] = {
    "inspect": "Show what a checkpoint holds, from headers alone",
    "verify": "Check that a checkpoint can be trusted, and say which evidence says so",
    "seal": "Record digests of a checkpoint, so that any later change is found",
    "latest": "Print the newest checkpoint that passes",
    "demo": "Make a small real checkpoint, damage it, and walk through the incident",
    "completions": "Print the completion script of a shell",
    "help": "Explain exit codes, the environment, or a verb",
}

# Flags that delete, overwrite or skip a check: nobody may inherit them from an environment.
NO_ENVIRONMENT = frozenset(
    {"apply", "force", "overwrite", "purge_now", "skip_unsafe", "skip_unverified", "yes"}
    | {"no_proof", "proof"}
)

# What `typer` raises for a wrong command line; it exports only the subclass.
_UsageError = cast(type[Exception], typer.BadParameter.__mro__[1])


def _common(
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on stdout, errors included.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No progress and no remarks on stderr.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Options of every verb."""


def _storage(
    endpoint: Annotated[
        str, typer.Option(metavar="URL", help="S3-compatible service (AWS_ENDPOINT_URL).")
    ] = "",
    profile: Annotated[
        str, typer.Option(metavar="NAME", help="Profile of the AWS configuration.")
    ] = "",
    region: Annotated[str, typer.Option(metavar="NAME", help="Region of the bucket.")] = "",
    requester_pays: Annotated[
        bool, typer.Option("--requester-pays", help="Pay for reading somebody else's bucket.")
    ] = False,
    anonymous: Annotated[bool, typer.Option("--anonymous", help="Send no credentials.")] = False,
    retry_seconds: Annotated[
        float, typer.Option(metavar="S", min=0, help="How long one request is tried again.")
    ] = StoreOptions().retry_seconds,
) -> None:
    """Options of every verb that opens a place."""


_COMMON = set(_common.__annotations__) - {"return"}
_STORAGE = set(_storage.__annotations__) - {"return"}


def _parameters(function: Any) -> list[Any]:
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(function)
    return typer.main.get_command(app).params


class Verb(TyperCommand):
    """A verb with the options that every verb has, its examples and its exit codes."""

    module: Any = None

    def invoke(self, ctx: Any) -> Any:
        """Run the verb with an `Invocation` as the context's object."""
        common = {k: ctx.params.pop(k) for k in _COMMON & ctx.params.keys()}
        storage = {k: ctx.params.pop(k) for k in _STORAGE & ctx.params.keys()}
        invocation = cast(Invocation, ctx.find_root().obj)
        invocation.json |= common["json"]
        invocation.quiet |= common["quiet"]
        invocation.debug |= common["debug"]
        invocation.stores = StoreOptions(**storage)
        invocation.environment = environment_flags(ctx)
        invocation.started = True
        ctx.obj = invocation
        return super().invoke(ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, the verb's own options, then those of every verb."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                sections.setdefault(self._section(param), []).append(record)
        for name in ("Arguments", "Options", "Storage options", "Common options"):
            if name in sections:
                with formatter.section(name):
                    formatter.write_dl(sections[name])

    def _section(self, param: Any) -> str:
        if param.param_type_name == "argument":
            return "Arguments"
        if param.name in _STORAGE:
            return "Storage options"
        return "Common options" if param.name in _COMMON | {"help"} else "Options"

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

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the verbs in the order of the help."""
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import a verb; None where there is no such verb."""
        return load(cmd_name) if cmd_name in VERBS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the verb that the command line names, or suggest what was meant."""
        name = args[0]
        if name not in VERBS and not name.startswith("-"):
            near = get_close_matches(name, VERBS)
            meant = f"; did you mean {' or '.join(near)}?" if near else ""
            ctx.fail(f"there is no verb {name!r}{meant}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the verbs from the static table."""
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))


def load(verb: str) -> Verb:
    """Import a verb's module and return its command."""
    module = import_module(f"ftckpt.commands.{verb}")
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(name=verb, cls=Verb)(module.command)
    command = cast(Verb, typer.main.get_command(app))
    command.module = module
    if getattr(module, "STORAGE", True):
        command.params += _parameters(_storage)
    command.params += _parameters(_common)
    for param in command.params:
        if isinstance(param, TyperOption):
            param.show_envvar = False  # one rule for all, told by `ftckpt help environment`
            if param.name not in NO_ENVIRONMENT:
                param.envvar = environment_name(verb, param.opts)
    return command


app = typer.Typer(
    name="ftckpt",
    cls=Verbs,
    help="Checkpoint operations for large-model training.",
    epilog="ftckpt VERB --help explains a verb, ftckpt help exit-codes what scripts can rely on.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    subcommand_metavar="VERB ...",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        write(sys.stdout, f"ftckpt {__version__}\n")
        raise typer.Exit


@app.callback()
def options(
    ctx: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            is_eager=True,
            callback=_print_version,
            help="Show the version and exit.",
        ),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Remember what stands before the verb."""
    ctx.obj.debug |= debug


def environment_flags(ctx: Any) -> dict[str, str]:
    """Return the environment variables that set flags of this run, with their values."""
    found = {}
    for param in ctx.command.params:
        source = ctx.get_parameter_source(param.name)
        if source is not None and source.name == "ENVIRONMENT":
            found[param.envvar] = os.environ.get(param.envvar, "")
    return found


def environment_name(verb: str, flags: Sequence[str]) -> str:
    """Return the variable that sets a flag: FTCKPT_VERIFY_MAX_MEMORY for `--max-memory`."""
    name = f"ftckpt_{verb}_{max(flags, key=len).lstrip('-')}"
    return name.replace("-", "_").upper()


class _Line(NamedTuple):
    """What can be said of a command line before it is parsed."""

    verb: str
    json: bool
    debug: bool


def scan(arguments: Sequence[str]) -> _Line:
    """Find verb, `--json` and `--debug` on a command line that may not parse."""
    words = list(arguments)
    flags = words[: words.index("--")] if "--" in words else words
    verb = next((w for w in words if not w.startswith("-")), "")
    verb = verb if verb in VERBS else ""
    variable = os.environ.get(f"FTCKPT_{verb.upper()}_JSON", "")
    return _Line(verb, "--json" in flags or bool(variable), "--debug" in flags)


def execute(arguments: Sequence[str], invocation: Invocation) -> Result:
    """Run a command line and return how it ended; raises what the verb raises."""
    root = typer.main.get_command(app)
    words = list(arguments)
    if not words:
        with root.make_context("ftckpt", ["--version"], resilient_parsing=True) as ctx:
            write(sys.stderr, root.get_help(ctx) + "\n")
        return Result(ExitCode.USAGE, "no verb was given", "see ftckpt --help")
    try:
        with root.make_context("ftckpt", words, obj=invocation, max_content_width=100) as ctx:
            result = root.invoke(ctx)
    except typer.Exit as asked:
        return Result(ExitCode(asked.exit_code))
    return result if isinstance(result, Result) else Result()


def run(arguments: Sequence[str], invocation: Invocation) -> Result:
    """Run a command line; every failure becomes a Result, with its words on stderr."""
    try:
        return execute(arguments, invocation)
    except ClosedPipeError:
        return Result(ExitCode.CLOSED_PIPE, "the output was closed")
    except BrokenPipeError as error:  # typer prints the help by itself; no store lets one through
        with suppress(ClosedPipeError):
            unwritable(sys.stdout, error)
        return Result(ExitCode.CLOSED_PIPE, "the output was closed")
    except SignalError as signal:
        invocation.close()
        complain(signal.message)
        return Result(signal.code, signal.message)
    except KeyboardInterrupt:
        complain("interrupted")
        return Result(ExitCode.INTERRUPTED, "interrupted")
    except BaseException as error:
        invocation.close()
        if invocation.debug and not isinstance(error, _UsageError):
            import traceback

            write(sys.stderr, traceback.format_exc())
        result = verdict(error, invocation.verb)
        complain(printable(result.message), printable(result.hint))
        return result


def verdict(error: BaseException, verb: str = "") -> Result:
    """Return the exit code and the words for an exception."""
    if isinstance(error, FtckptError):
        return Result(error.exit_code, error_line(error), error.hint)
    if isinstance(error, _UsageError):
        message = " ".join(cast(Any, error).format_message().split()).rstrip(".")
        return Result(ExitCode.USAGE, message, f"see ftckpt {verb} --help".replace("  ", " "))
    if isinstance(error, MemoryError):
        return Result(
            ExitCode.NO_RESOURCE,
            "the memory of this machine or of its limits does not suffice",
            "see the verb's --max-memory and --jobs, or the memory limit of the job",
        )
    return Result(
        ExitCode.INTERNAL,
        f"a bug in ftckpt {__version__}: {type(error).__name__}: {error}",
        "this says nothing about the checkpoint; please report it with the output of the same "
        "command under --debug",
    )


def prepare_streams() -> None:
    """Make every text printable in every locale, as escapes where the encoding lacks it."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and end the process with the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    line = scan(words)
    invocation = Invocation(verb=line.verb, json=line.json, debug=line.debug)
    printed: list[bool] = []

    def print_document(result: Result) -> None:
        if invocation.json and not printed:
            printed.append(True)
            write(sys.stdout, json_text(document(invocation, result)) + "\n")

    def last_words(code: ExitCode) -> None:
        message = "interrupted" if code is ExitCode.INTERRUPTED else "terminated"
        # The signal may have come in the middle of a write, or nobody may read any more.
        with suppress(ClosedPipeError, FtckptError, RuntimeError):
            print_document(Result(code, message))

    prepare_streams()
    catch_signals(last_words)
    try:
        result = run(words, invocation)
        if invocation.started or result.code:  # else help or the version was the answer
            print_document(result)
        write(sys.stdout, "")
    except ClosedPipeError:
        result = Result(ExitCode.CLOSED_PIPE)
    except FtckptError as error:  # stdout is full: there is no place for a document
        result = Result(error.exit_code, error.message)
        complain(error.message, error.hint)
    except SignalError as signal:
        last_words(signal.code)
        result = Result(signal.code)
    invocation.close()
    if result.code >= ExitCode.INTERRUPTED:
        leave(result.code)  # threads of the interrupted work may hang in the network
    sys.exit(int(result.code))


def document(invocation: Invocation, result: Result) -> dict[str, Any]:
    """Return the one JSON document of a run."""
    name = f"ftckpt.{invocation.verb}/1" if invocation.verb else "ftckpt/1"
    body = {"schema": name, "target": None, "format": None} | invocation.document
    if invocation.environment:
        body["environment"] = dict(invocation.environment)
    return body | {"result": result_record(*result)}
