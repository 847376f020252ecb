"""From a command line to the end of the process; the only place where errors become exit codes."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

from ftckpt import plugins
from ftckpt.errors import DeniedError, ExitCode, FtckptError, NoResourceError, UsageError
from ftckpt.storage.remotes import named_in
from ftckpt.storage.secrets import hidden, withheld
from ftckpt.version import __version__
from ftckpt.workers.memory import spare_addresses

from . import watchdog
from .environment import HELP, environment_name, is_secret, said_again
from .invocation import Invocation, Result, complain
from .mistakes import misplaced, refused, resolve
from .render import error_line, json_text, printable, result_record
from .terminal import ClosedPipeError, unwritable, write
from .verbs import RESUMABLE, VERBS, family, load, named
from .watchdog import SignalError, answer_signals, leave, signals_caught

_VERSION = ("--version", "-V")
# A command line that is longer is not said again.
_SHOWN = 200

_HOOK = re.compile("--(alert-url|on-[a-z]+)")


class _Line(NamedTuple):
    """What can be said of a command line before it is parsed."""

    verb: str
    json: bool
    debug: bool


def scan(arguments: Sequence[str]) -> _Line:
    """Find verb, `--json` and `--debug` on a command line that may not parse."""
    words = list(arguments)
    flags = words[: words.index("--")] if "--" in words else words
    verb = named(before_verb(words)[1][:2])
    variable = os.environ.get(environment_name("--json"), "").strip().lower()
    wanted = "--json" in flags or variable in ("1", "true", "t", "yes", "y", "on")
    return _Line(verb, wanted, "--debug" in flags)


def before_verb(words: Sequence[str]) -> tuple[list[str], list[str], str]:
    """Return the options before the verb, the line from the verb on, and a strange option.

    That is the first one that not every verb has: whether a value follows it is not known.
    """
    if not words or not words[0].startswith("-"):
        return [], list(words), ""
    from .derive import before_the_verb

    valued = dict.fromkeys((*HELP, *_VERSION), False)
    valued |= {name: not one.is_flag for one in before_the_verb() for name in one.opts}
    at, strange = 0, ""
    while at < len(words) and words[at].startswith("-") and words[at].strip("-"):
        name, joined, _ = words[at].partition("=")
        strange = strange or ("" if name in valued else words[at])
        at += 2 if valued.get(name) and not joined else 1
    return list(words[:at]), list(words[at:]), strange


def execute(arguments: Sequence[str], invocation: Invocation) -> Result:
    """Run a command line and return how it ended; raises what the verb raises."""
    words = _without_secrets(arguments)
    invocation.words = words
    before, rest, strange = before_verb(words)
    if strange:
        raise misplaced(strange)
    if not rest or rest == ["version"] or {*before}.intersection(_VERSION):
        return _without_verb(["--version"] if rest == ["version"] else before)
    if before:  # every verb takes them behind it
        size = len(named(rest).split()) or len(rest)
        rest = [*rest[:size], *before, *rest[size:]]
        invocation.words = rest
    if not named(rest) and family(rest[0]) and {*HELP}.intersection(rest[1:]):
        from .overview import family_help

        write(sys.stdout, family_help(rest[0]) + "\n")
        return Result()
    verb, rest = resolve(rest)
    from click import exceptions

    command = load(verb)
    try:
        with command.make_context(f"ftckpt {verb}", list(rest), obj=invocation) as ctx:
            result = ctx.command.invoke(ctx)
    except exceptions.Exit as asked:
        return Result(ExitCode(asked.exit_code))
    except exceptions.UsageError as error:
        raise refused(error, command, rest) from error
    except OSError as error:
        if not invocation.started:  # click prints the help by itself
            unwritable(sys.stdout, error)
        raise
    return result if isinstance(result, Result) else Result()


def _without_verb(words: list[str]) -> Result:
    from . import root

    asked = [one for one in words if one in (*HELP, *_VERSION)]
    if not asked:
        write(sys.stderr, root.help_text() + "\n")
        return Result(ExitCode.USAGE, "no verb was given", "see ftckpt --help")
    try:
        root.answer(asked)
    except OSError as error:  # typer prints the help by itself
        unwritable(sys.stdout, error)
        raise
    return Result()


def _without_secrets(arguments: Sequence[str]) -> list[str]:
    """Return the words with URLs as they may be shown; the process keeps what is left out.

    Webhooks are no places, and hide themselves; what follows `--` is another program's.

    Raises:
        UsageError: as `withheld`.
    """
    words, kept = list(arguments), []
    end = words.index("--") if "--" in words else len(words)
    for number, word in enumerate(words[:end]):
        flag, mark, value = word.partition("=")
        before = words[number - 1] if number else ""
        if ":" not in word or _HOOK.fullmatch(flag if mark else before):
            kept.append(word)
        elif flag.startswith("--") and mark:
            kept.append(f"{flag}={withheld(value)}")
        else:
            kept.append(withheld(word))
    return kept + words[end:]


def run(arguments: Sequence[str], invocation: Invocation) -> Result:
    """Run a command line; every failure becomes a Result, with its words on stderr."""
    result = _run(arguments, invocation)
    for sentence in plugins.failures():
        if sentence != result.message:
            invocation.warn(f"warning: {printable(sentence)}")
    if invocation.on_end is not None:
        try:
            invocation.on_end(result)
        except Exception as error:  # the verdict stays
            invocation.warn(f"alerts: {type(error).__name__}: {error}")
    return result


def _run(arguments: Sequence[str], invocation: Invocation) -> Result:
    try:
        return execute(arguments, invocation)
    except ClosedPipeError:
        return Result(ExitCode.CLOSED_PIPE, "the output was closed")
    except SignalError as ended:
        invocation.close()
        return _ended(ended, invocation)
    except KeyboardInterrupt:
        complain("interrupted")
        return Result(ExitCode.INTERRUPTED, "interrupted")
    except BaseException as error:
        invocation.close()
        if invocation.debug and not isinstance(error, UsageError):
            import traceback

            write(sys.stderr, hidden(traceback.format_exc()))
        code, message, hint = verdict(error, invocation.verb)
        result = Result(code, hidden(message), hidden(hint))
        invocation.complain(result.code, printable(result.message), printable(result.hint))
        return result


def _ended(signalled: SignalError, invocation: Invocation) -> Result:
    """Say that a signal ended the run, and what to do next."""
    again = "" if invocation.verb not in RESUMABLE else _again(invocation)
    complain(signalled.message, again)
    return Result(signalled.code, signalled.message, again)


def _again(invocation: Invocation) -> str:
    """Say which command goes on where this one was; URLs may hold what is not for a log."""
    typed = shlex.join(["ftckpt", *said_again(invocation.words)])
    if "://" in typed or len(typed) > _SHOWN:
        return f"the same ftckpt {invocation.verb} goes on where this one was"
    return f"the same command goes on where this one was: {typed}"


def verdict(error: BaseException, verb: str = "") -> Result:
    """Return the exit code and the words for an exception."""
    if isinstance(error, FtckptError):
        return Result(error.exit_code, error_line(error), error.hint)
    if isinstance(error, MemoryError) or _found_no_room(error):
        return Result(
            ExitCode.NO_RESOURCE,
            "the memory of this machine or of its limits does not suffice",
            "see the verb's --max-memory and --jobs, or the memory limit of the job",
        )
    if isinstance(error, RuntimeError) and str(error).startswith("can't start new thread"):
        return Result(
            ExitCode.NO_RESOURCE,
            "the system starts no more threads for this process",
            "raise the limit of processes (ulimit -u, or the job's), or lower --jobs",
        )
    if isinstance(error, OSError):
        from ftckpt.storage.local.oserror import AWAY, translate

        refused = translate(error, str(error.filename or "a file"), "use")
        # The machine's word, no bug of ours.
        if isinstance(refused, (DeniedError, NoResourceError)) or error.errno in AWAY:
            return Result(refused.exit_code, error_line(refused), refused.hint)
    from ftckpt.packages import missing_package

    missing = missing_package(error)
    if missing is not None:
        return Result(missing.exit_code, missing.message, missing.hint)
    lost = _lost_module(error)
    if lost:
        return Result(
            ExitCode.UNAVAILABLE,
            f"{lost} of ftckpt itself cannot be read: {error}",
            "the filesystem that ftckpt is installed on is away, or it was just installed anew",
        )
    added = plugins.plugins(plugins.VERBS).get(verb) if verb and verb not in VERBS else None
    if added is not None:
        return Result(
            ExitCode.INTERNAL,
            f"the verb {verb!r} of the package {added.package} failed: "
            f"{type(error).__name__}: {error}",
            "this says nothing about the checkpoint; please tell those who made the package",
        )
    return Result(
        ExitCode.INTERNAL,
        f"a bug in ftckpt {__version__}: {type(error).__name__}: {error}",
        "this says nothing about the checkpoint; please report it with the output of the same "
        "command under --debug",
    )


def _lost_module(error: BaseException) -> str:
    """Return the name of a module that is installed and cannot be read, or ''."""
    if not isinstance(error, ImportError) or not error.name:
        return ""
    unreadable = "Input/output error" in str(error) or "cannot read file data" in str(error)
    gone = isinstance(error, ModuleNotFoundError) and error.name.startswith("ftckpt.")
    return error.name if unreadable or gone else ""


def _found_no_room(error: BaseException) -> bool:
    """Say whether a library could not be mapped, which the dynamic linker says in words alone."""
    return isinstance(error, ImportError) and bool(
        re.search("failed to map segment|[Cc]annot allocate memory", str(error))
    )


def prepare_streams() -> None:
    """Make every text printable in every locale, as escapes where the encoding lacks it."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and end the process with the exit code.

    Args:
        arguments: instead of the process's own; then it ends by SystemExit, and signals are handled
            again as they were before.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    line = scan(words)
    invocation = Invocation(verb=line.verb, words=words, json=line.json, debug=line.debug)
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

    def last_words_for(number: int) -> None:
        """Say for a process that cannot: it hangs in C code."""
        code = ExitCode.INTERRUPTED if number == signal.SIGINT else ExitCode.TERMINATED
        with suppress(ClosedPipeError, FtckptError, RuntimeError):
            print_document(_ended(SignalError(code), invocation))

    if arguments is None:
        answer_signals(invocation.tell_progress)
        invocation.on_begin = lambda: watchdog.start(last_words_for)
    prepare_streams()
    spare_addresses()
    with signals_caught(last_words):
        try:
            result = run(words, invocation)
            if invocation.started or result.code:  # else help or the version was the answer
                print_document(result)
            write(sys.stdout, "")
        except ClosedPipeError:
            result = Result(ExitCode.CLOSED_PIPE)
        except FtckptError as error:  # stdout is full: a document has no place
            result = Result(error.exit_code, error.message)
            complain(error.message, error.hint)
        except SignalError as ended:
            last_words(ended.code)
            result = Result(ended.code)
        invocation.close()
        if arguments is None or result.code >= ExitCode.INTERRUPTED:
            # Threads of interrupted work may hang in the network, and taking a large index apart
            # object by object would cost more than the answer did.
            leave(result.code)
    sys.exit(int(result.code))


def document(invocation: Invocation, result: Result) -> dict[str, Any]:
    """Return the one JSON document of a run."""
    name = f"ftckpt.{invocation.verb.replace(' ', '-')}/1" if invocation.verb else "ftckpt/1"
    body = {"schema": name, "target": None, "format": None} | invocation.document
    if invocation.environment:
        body["environment"] = _without_tokens(invocation.environment)
    if invocation.settings:
        body["settings"] = _without_tokens(invocation.settings)
    remotes = named_in([*invocation.words, *invocation.environment.values()])
    if remotes:
        body["remotes"] = remotes
    return body | {"result": result_record(*result)}


def _without_tokens(values: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out webhooks and the commands of alerts: they hold what lets anybody post there."""
    return {k: "(hidden)" if is_secret(k) else _plain(v) for k, v in values.items()}


def _plain(value: Any) -> Any:
    return hidden(value) if isinstance(value, str) else value
