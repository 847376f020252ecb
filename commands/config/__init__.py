"""`ftckpt config`: which settings are active, and where each comes from."""

from __future__ import annotations

import os
from typing import Annotated, Any

from ftckpt.commands.cli.environment import PREFIX, is_secret
from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.render import block, pairs, table
from ftckpt.commands.cli.verbs import is_verb, load, named
from ftckpt.errors import ExitCode, UsageError
from ftckpt.findings import counted
from ftckpt.operations.definition import argument
from ftckpt.storage.remotes import remotes
from ftckpt.storage.secrets import hidden
from ftckpt.storage.settings import SettingsFile, read_settings

from .defaults import defaults, defaults_of, policies

STORAGE = False
# What follows the verb belongs to that verb.
CONTEXT = {"ignore_unknown_options": True, "allow_interspersed_args": False}
EXAMPLES = (
    ("ftckpt config verify", "what the options of verify are, and who has set each"),
    ("ftckpt config", "the file of settings, the environment, remotes, policies"),
    ("ftckpt config copy --jobs 4", "each option of copy, its value, and who has set it"),
)
CODES = {
    ExitCode.OK: "shown",
    ExitCode.USAGE: "the file of settings is wrong: the line is named",
    ExitCode.DENIED: "the file of settings may not be read",
}
_LONG = 60
_NOT_SHOWN = "set, not shown"


def command(
    invocation: Invocation,
    words: Annotated[
        list[str] | None, argument("[VERB [OPTIONS]]", "Explain the options of this verb.")
    ] = None,
) -> Result:
    """Show which settings are active, and where each comes from.

    An option on the command line goes before the environment, that before the file of settings,
    and that before the default. Nothing that deletes, overwrites or skips a check can be set in
    the file. docs/config.md explains what can.
    """
    settings = read_settings()
    there = bool(settings.text) or os.path.exists(settings.path)
    invocation.report(target=settings.path, file=settings.path if there else None)
    if words:
        return _of_verb(invocation, settings, words)
    set_here = defaults(settings, is_verb)
    set_here = [one._replace(value=_value(one.option, one.value)) for one in set_here]
    rows: list[list[Any]] = [
        [f"--{one.option}", one.value, one.verb or "every verb", f"line {one.line}"]
        for one in set_here
    ]
    chosen, known = policies(settings), remotes()
    variables = {name: _shown(name) for name in sorted(os.environ) if _matters(name)}
    invocation.report(
        defaults=[one._asdict() for one in set_here],
        remotes={one.name: {"url": one.url, **dict(one.settings)} for one in known.values()},
        policies=[one._asdict() for one in chosen],
        environment_variables=variables,
    )
    invocation.print(f"settings: {settings.path}" + ("" if there else " (there is none)"))
    if rows:
        invocation.print(block("", table(["default", "value", "of", "from"], rows)))
    if known:
        head = ["remote", "url", "with"]
        shown = [
            [f"{one.name}:", one.url, ", ".join(f"{k}={v}" for k, v in one.settings)]
            for one in known.values()
        ]
        invocation.print(block("", table(head, shown)))
    if chosen:
        shown = [[one.root, one.file] for one in chosen]
        invocation.print(block("", table(["root", "policy of gc's plans and status"], shown)))
    if variables:
        invocation.print(block("", pairs(list(variables.items()))))
    message = f"{counted(len(rows), 'default')}, {counted(len(known), 'remote')}"
    return Result(ExitCode.OK, message)


def _matters(name: str) -> bool:
    return name.startswith((PREFIX, "AWS_")) or name in ("NO_COLOR", "XDG_CONFIG_HOME")


def _shown(name: str) -> str:
    return _NOT_SHOWN if is_secret(name) else hidden(os.environ[name])


def _of_verb(invocation: Invocation, settings: SettingsFile, words: list[str]) -> Result:
    name = named(words)
    if not name:
        from ftckpt.commands.cli.mistakes import unknown_verb

        raise unknown_verb(words)
    verb, rest = load(name), words[len(name.split()) :]
    known = {one for p in verb.params for one in (*p.opts, *p.secondary_opts)}
    end = rest.index("--") if "--" in rest else len(rest)
    for word in rest[:end]:
        if word.startswith("--") and word.partition("=")[0] not in known:
            raise UsageError(f"{name} has no {word.partition('=')[0]}", hint=f"ftckpt {name} -h")
    # Those of the verb come last, and go before those of all verbs.
    here = [one for one in defaults(settings, is_verb) if one.verb in ("", name)]
    lines = {one.option.replace("-", "_"): one.line for one in here}
    found = []
    with verb.make_context(
        name, list(rest), resilient_parsing=True,
        default_map=defaults_of(name, is_verb),
    ) as its:  # fmt: skip
        for param in verb.params:
            if param.param_type_name == "argument" or param.name not in its.params:
                continue
            source = its.get_parameter_source(param.name)
            kind = "" if source is None else source.name
            came = {
                "COMMANDLINE": "command line",
                "ENVIRONMENT": str(param.envvar),
                "DEFAULT_MAP": f"{settings.path}, line {lines.get(str(param.name))}",
            }.get(kind, "default")
            option = _long(param.opts)
            value = _value(option, _plain(its.params[param.name]))
            found.append({"option": option, "value": value, "from": came})
    invocation.report(options=found)
    invocation.print(
        table(
            ["option", "value", "from"],
            [[one["option"], _text(one["value"]), one["from"]] for one in found],
        )
    )
    chosen = sum(one["from"] != "default" for one in found)
    return Result(ExitCode.OK, f"{counted(chosen, 'option')} of {name} set")


def _long(options: list[str]) -> str:
    return next((one for one in options if one.startswith("--")), options[0])


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value if value is None or isinstance(value, (bool, int, float)) else hidden(str(value))


def _value(option: str, value: Any) -> Any:
    return _secret(value) if value and is_secret(option) else value


def _secret(value: Any) -> str:
    """Return of a webhook the host alone, by which a person knows it; of anything else nothing."""
    from urllib.parse import urlsplit

    try:
        host = urlsplit(str(value)).hostname
    except ValueError:
        host = None
    return f"{host}, the rest not shown" if host and "://" in str(value) else _NOT_SHOWN


def _text(value: Any) -> str:
    if value in (None, "", []):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= _LONG else f"{text[:_LONG]}..."
