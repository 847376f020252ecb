"""A verb's command line, made of the annotations of its operation (`ftckpt.operations`).

click parses. Every value is what the annotation says: text, a number, a word of an enum, a list.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass, replace
from enum import StrEnum
from inspect import Parameter, cleandoc, signature
from types import ModuleType
from typing import Annotated, Any, ForwardRef, NamedTuple, NoReturn, get_args

import click

from ftckpt import amounts
from ftckpt.errors import ExitCode, UsageError
from ftckpt.operations.definition import (
    Opt,
    Taken,
    call,
    definition_of,
    groups,
    option,
    switch,
    taken,
)
from ftckpt.reports import document
from ftckpt.storage.options import StoreOptions

from .bounds import bound_memory
from .environment import HELP, environment_flags, environment_name, refuse_unknown
from .invocation import Invocation, ProgressChoice
from .render import ALWAYS, MEANINGS

# What is asked for least stands last of a verb's own headings.
LATE = "How it is done"


def _common(
    json: Annotated[
        bool, switch("--json", "Print one JSON document on stdout, errors included.")
    ] = False,
    quiet: Annotated[
        bool, switch("--quiet", "No progress and no remarks on stderr; warnings stay.", "-q")
    ] = False,
    progress: Annotated[
        ProgressChoice, option("", "auto: a bar, or a line now and then; json: a record a second.")
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


# No step, size or count of anything is larger, and no float or array takes every larger one.
_MOST = 1 << 63
# Amounts that many verbs take, read before a verb begins, so that a mistake names the option.
_AMOUNTS: Mapping[str, Callable[[str], object]] = {
    "limit_rate": amounts.rate, "max_memory": amounts.size, "sample": amounts.share,
}  # fmt: skip
# A longer value is not repeated whole.
_SHOWN = 40

# Names of the options that every verb has, and every verb that opens a place.
COMMON = set(_common.__annotations__) - {"return"}
STORAGE = set(_storage.__annotations__) - {"return"}


# What `Opt.assumed` is typed with.
SET = "--set"


def before_the_verb() -> list[click.Option]:
    """Return the options that may stand before the verb, too."""
    ours = (parameter(one) for one in (*taken(_common), *taken(_storage)))
    return [one for one in ours if isinstance(one, click.Option)]


class OneOf(click.Choice[str]):
    """One of some words."""

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        """Return the word; another is refused in our words."""
        if value not in self.choices:
            self._refuse(str(value), param, ctx)
        return str(value)

    def _refuse(self, value: str, param: Any, ctx: Any) -> NoReturn:
        from difflib import get_close_matches

        near = get_close_matches(value.lower(), self.choices, 1)
        meant = f"; did you mean {near[0]}?" if near else ""
        *most, last = self.choices
        words = f"{', '.join(most)} or {last}" if most else last
        self.fail(f"takes {words}, not {_quoted(value)}{meant}", param, ctx)


class Number(click.ParamType[Any]):
    """A number, or a whole number, from `min` to `max`."""

    def __init__(self, kind: type[int] | type[float], least: float | None, most: float | None):
        self.kind, self.min, self.max = kind, least, most
        self.name = "integer" if kind is int else "number"

    @property
    def range(self) -> str:
        """Which numbers it takes, for the help; "" where any count is."""
        if self.max is not None:
            return f"{self.min} to {self.max}"
        return f"from {self.min}" if self.min is not None and self.min > 1 else ""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the number; anything else is refused in our words."""
        try:
            number = self.kind(value)
        except (ValueError, OverflowError):
            number = None
        least = -_MOST if self.min is None else self.min
        most = _MOST if self.max is None else self.max
        if number is None or not least <= number <= most:
            what = "a whole number" if self.kind is int else "a number"
            if self.min is not None:
                what += f" from {self.min}" + (f" to {self.max}" if self.max is not None else "")
            self.fail(f"takes {what}, not {_quoted(value)}", param, ctx)
        return number


class OnOff(click.types.BoolParamType):
    """Whether an option is on; a variable of the environment says it in a word."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return whether it is on; another word is refused in our words."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f"takes 1 or 0, not {_quoted(value)}", param, ctx)


def _quoted(value: Any) -> str:
    text = str(value)
    return f'"{text}"' if len(text) <= _SHOWN else f'"{text[:_SHOWN]}…"'


class VerbOption(click.Option):
    """An option, the words that it takes, and what its definition says beside."""

    def __init__(
        self, names: Sequence[str], words: tuple[str, ...], opt: Opt, **settings: Any
    ) -> None:
        super().__init__(names, **settings)
        self.words, self.bare, self.under = words, opt.bare, opt.under

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return its names with what stands for the value, and what it does."""
        if self.hidden:
            return None
        names = ", ".join(sorted(self.opts, key=lambda name: name.startswith("--")))
        words = f"[{'|'.join(self.words)}]" if self.metavar is None and self.words else ""
        more = [f"default: {self.default}"] if self.show_default else []
        more += [self.type.range] if isinstance(self.type, Number) and self.type.range else []
        more += ["required"] if self.required else []
        value = "" if self.is_flag else f" {self.metavar or words}"
        return names + value, f"{self.help}  [{'; '.join(more)}]" if more else str(self.help)

    def short_record(self, ctx: click.Context) -> tuple[str, str]:
        """Return the same with the words that it takes beside it, not in its name."""
        term, says = self.get_help_record(ctx) or ("", "")
        if self.metavar is not None or not self.words:
            return term, says
        if not all(word in says for word in self.words):
            text, mark, rest = says.partition(".  [")
            says = f"{text.rstrip('.')}: {', '.join(self.words)}{mark or '.'}{rest}"
        return f"{term.partition(' [')[0]} WORD", says


class VerbArgument(click.Argument):
    """An argument with a line of its own in the help, and the words that it takes."""

    def __init__(self, name: str, words: tuple[str, ...], text: str, **settings: Any) -> None:
        super().__init__([name], **settings)
        self.words, self.about = words, text

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        """Return what stands for it, and what it is."""
        default = self.get_default(ctx, call=False)
        more = "required" if self.required else f"default: {default}" if default else ""
        return self.make_metavar(ctx), f"{self.about}  [{more}]" if more else self.about

    def short_record(self, ctx: click.Context) -> tuple[str, str]:
        """Return the same; the usage shows whether it is required."""
        term, says = self.get_help_record(ctx)
        return term, says.removesuffix("  [required]")


def parameter(one: Taken, *, variable: bool = False) -> click.Parameter:
    """Return what click has for a parameter of an operation; `variable`: whether it has one."""
    opt, kind = one.opt, _plain(one.kind)
    several = isinstance(kind, Several)
    enum = kind if isinstance(kind, type) and issubclass(kind, StrEnum) else None
    words = opt.words if enum is None else tuple(str(word) for word in enum)
    typed: click.ParamType[Any] = click.STRING
    if enum is not None:
        typed = OneOf(words)
    elif kind in (int, float):
        typed = Number(kind, opt.min, opt.max)
    required = one.default is Parameter.empty
    default = None if required or several else one.default
    if enum is not None and default is not None:
        default = str(default)

    def value(ctx: click.Context, param: click.Parameter, given: Any) -> Any:
        read = _AMOUNTS.get(one.name)
        if read is not None and given and isinstance(given, str):
            try:
                read(given)
            except UsageError as error:  # which does not know the option
                raise UsageError(f"{param.opts[-1]}: {error.message}", hint=error.hint) from error
        if several:
            return list(given) if given else one.default
        return enum(given) if enum is not None and given is not None else given

    settings: dict[str, Any] = {"type": typed, "callback": value, "metavar": opt.metavar or None}
    if not required:  # None would be a value
        settings["default"] = default
    if opt.argument:
        return VerbArgument(
            one.name, words, opt.help, required=required,
            nargs=-1 if several else 1, **settings,
        )  # fmt: skip
    named = list(opt.names) or [f"--{one.name.rstrip('_').replace('_', '-')}"]
    if opt.assumed:  # one option of click's, whose name no single word of a shell is (`_joined`)
        named = [f"{SET} {named[0].removeprefix('--')}"]
    if kind is bool:
        settings |= {"is_flag": True, "type": OnOff(), "metavar": None}
    return VerbOption(
        [one.name, *named], words, opt, multiple=several, required=required,
        help=opt.help, hidden=opt.hidden,
        show_default=not (default is None or default is False or default == ""),
        envvar=environment_name(named[0]) if variable else None,
        **settings,
    )  # fmt: skip


def _itself(invocation: Invocation, _: Mapping[str, Any]) -> Invocation:
    return invocation


class Several(NamedTuple):
    """A list of texts."""


def _plain(kind: Any) -> Any:
    """Return what one value on a command line is, of what an annotation allows."""
    if isinstance(kind, (str, ForwardRef)):
        return str  # a place, or what Python callers have opened
    kinds = [one for one in get_args(kind) if one is not type(None)] or [kind]
    names = {getattr(getattr(one, "__origin__", None), "__name__", "") for one in (kind, *kinds)}
    if names & {"list", "Sequence", "tuple"}:
        return Several()
    if len(kinds) > 1:  # a word, or a number with its unit
        enums = [one for one in kinds if isinstance(one, type) and issubclass(one, StrEnum)]
        return enums[0] if enums else str
    return kinds[0] if kinds[0] is kind else _plain(kinds[0])


def _joined(words: Sequence[str]) -> Iterator[str]:
    """Yield the words, `--set NAME=VALUE` as one."""
    rest = iter(words)
    for word in rest:
        if word == SET:
            yield f"{SET} {next(rest, '')}".rstrip()
        else:
            yield f"{SET} {word[len(SET) + 1 :]}" if word.startswith(f"{SET}=") else word


class OptionGroup(NamedTuple):
    """Options that several verbs share, under a heading of their own in the help.

    Attributes:
        type: the dataclass whose fields are the options.
        names: of its fields.
    """

    type: type[Any]
    names: frozenset[str]


class Verb(click.Command):
    """A verb with the options that every verb has, its examples and its exit codes.

    Args:
        name: of the verb.
        module: of `ftckpt.commands`, see there.
        settled: returns what the user's file of settings has for the options of a verb.
    """

    def __init__(
        self,
        name: str,
        module: ModuleType,
        settled: Callable[[str], Mapping[str, Any]],
        others: Sequence[str] = (),
    ) -> None:
        self.module, self._settled, self._others = module, settled, others
        self.operation: Callable[..., Any] | None = getattr(module, "operation", None)
        function = self.operation or module.command
        self.groups: list[OptionGroup] = []
        self.examples: Sequence[tuple[str, str]] = ()
        self.codes: Mapping[ExitCode, str] = {}
        self.everyday: Sequence[str] = getattr(module, "EVERYDAY", ())
        if self.operation is None:
            self.examples, self.codes = module.EXAMPLES, module.CODES
            text = cleandoc(module.command.__doc__ or "")
        else:
            said = definition_of(self.operation)
            self.examples, self.codes, text = said.examples, said.codes, said.help
            self.everyday = said.everyday
            self._known = signature(self.operation).parameters.keys()
        params = [parameter(one) for one in taken(function)]
        self._held = {} if self.operation is None else groups(self.operation)
        for group in (*self._held.values(), *getattr(module, "OPTIONS", ())):
            made = [parameter(one) for one in taken(group)]
            self.groups.append(OptionGroup(group, frozenset(str(one.name) for one in made)))
            params += made
        if self.opens_places:
            params += [parameter(one, variable=True) for one in taken(_storage)]
        params += [parameter(one, variable=True) for one in taken(_common)]
        self._short = click.Option(
            ["-h"], is_flag=True, is_eager=True, expose_value=False, callback=self._print_short,
            help="Show what is needed every day, on one screen.",
        )  # fmt: skip
        settings = {"help_option_names": ["--help"], "max_content_width": 100}
        super().__init__(
            name, params=params, help=text,
            context_settings=settings | getattr(module, "CONTEXT", {}),
        )  # fmt: skip

    @property
    def opens_places(self) -> bool:
        """Whether it has the options of object stores."""
        if self.operation is not None:
            return "stores" in self._known
        return bool(getattr(self.module, "STORAGE", True))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line; some options may lack their value (`Opt.bare`).

        Such a value is joined by `=`: a word that follows is not a value of it.
        """
        bare = {n: p.bare for p in self.params if isinstance(p, VerbOption) and p.bare
                for n in p.opts}  # fmt: skip
        end = args.index("--") if "--" in args else len(args)
        # `help` and `completions` must answer with a wrong file too, and `config` names the line.
        settled = ctx.resilient_parsing or ctx.default_map is not None
        if not settled and self.opens_places and not {*HELP} & {*args[:end]}:
            ctx.default_map = dict(self._settled(str(self.name)))
        given = [f"{word}={bare[word]}" if word in bare else word for word in _joined(args[:end])]
        return super().parse_args(ctx, [*given, *args[end:]])

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters; the two helps come last."""
        *most, full = super().get_params(ctx)
        return [*most, self._short, full]

    def _print_short(self, ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
        if wanted and not ctx.resilient_parsing:
            click.echo(self.one_screen(ctx))
            ctx.exit()

    def one_screen(self, ctx: click.Context) -> str:
        """Return what is needed every day: 24 lines at most, where 80 columns are."""
        from .short_help import screen

        rows = []
        for one in self._everyday_first(ctx):
            if self._section_of(one) in ("Arguments", "Options"):
                rows.append(one.short_record(ctx))  # type: ignore[attr-defined]
        return screen(
            (self.help or "").strip().partition("\n")[0],
            f"{ctx.command_path} {' '.join(self.collect_usage_pieces(ctx))}",
            rows,
            self.examples,
            sum(isinstance(o, click.Option) and not o.hidden for o in self.get_params(ctx)),
            self._others,
        )

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb, and return what it returns."""
        given, invocation = ctx.params, ctx.obj
        assert isinstance(invocation, Invocation)
        common = {name: given.pop(name) for name in COMMON & given.keys()}
        storage = {name: given.pop(name) for name in STORAGE & given.keys()}
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
        device = given.get("device")
        for group in self.groups:
            values = {name: given.pop(name) for name in group.names}
            device = values.get("device", device)
            invocation.groups[group.type] = group.type(**values)
        # A verb that passes signals on to a command ends after it, in its own time.
        invocation.start(watched=getattr(self.module, "WATCHED", True))
        # `help` and `completions` must answer so that the right name can be found.
        if self.opens_places and any(name.startswith("FTCKPT_") for name in os.environ):
            refuse_unknown([environment_name(one.replace("_", "-")) for one in COMMON | STORAGE])
        if device not in (None, "cpu", "auto"):
            from ftckpt.transfer.device import torch_device

            torch_device(device)  # before anything is read
        if self.operation is None:
            return self.module.command(invocation, **given)
        return self._operate(invocation, given)

    def _operate(self, invocation: Invocation, given: Mapping[str, Any]) -> Any:
        """Call the operation, report what it returns, and let the module show it."""
        assert self.operation is not None
        if "max_memory" in given:
            bound_memory(given["max_memory"])  # what is shown is read under it, too
        if hasattr(self.module, "check"):
            given = self.module.check(invocation, given) or given
        invocation.screen = getattr(self.module, "observer", _itself)(invocation, given)
        ours = {"on": invocation.screen, "stores": invocation.stores}
        ours |= {name: invocation.options(group) for name, group in self._held.items()}
        if "division" in ours:
            ours["division"] = replace(ours["division"], line=tuple(invocation.words))
        report = call(
            self.operation, {**given, **{k: v for k, v in ours.items() if k in self._known}}
        )
        if is_dataclass(report):
            invocation.report(**document(report))
        if "division" in ours and ours["division"].asked:
            from ftckpt.operations.many import PartReport

            from .parts import show_part

            if isinstance(report, PartReport):
                return show_part(invocation, report, ours["division"])
        return self.module.render(invocation, report, given)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the usage, what the verb does, and its tables."""
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        self.format_options(ctx, formatter)
        self.format_epilog(ctx, formatter)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write arguments, the verb's own options, then those of every verb."""
        for name, rows in self.sections(ctx).items():
            with formatter.section(name):
                formatter.write_dl(rows)

    def sections(self, ctx: click.Context) -> dict[str, list[tuple[str, str]]]:
        """Return the headings of the help in their order, each with what stands below it.

        Options of every day come first, then the verb's others, then those of every verb; what few
        people need comes last.
        """
        rare = [str(one.type.TITLE) for one in self.groups if getattr(one.type, "RARE", False)]
        own = [one.under for one in self.params if isinstance(one, VerbOption) and one.under]
        own += [str(one.type.TITLE) for one in self.groups]
        own = [one for one in own if one not in rare and one != LATE]
        order = ["Arguments", "Options", *own, "Further options", LATE, "Common options",
                 *rare, "Storage options"]  # fmt: skip
        found: dict[str, list[tuple[str, str]]] = {name: [] for name in order}
        for param in self._everyday_first(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                found[self._section_of(param)].append(record)
        return {name: rows for name, rows in found.items() if rows}

    def _everyday_first(self, ctx: click.Context) -> list[click.Parameter]:
        places = {name: place for place, name in enumerate(self.everyday)}
        last = len(places)
        params = self.get_params(ctx)
        params.sort(key=lambda one: min(places.get(name, last) for name in one.opts))
        return sorted(params, key=lambda one: not isinstance(one, click.Argument))

    def _section_of(self, param: click.Parameter) -> str:
        """Return the heading that a parameter stands below."""
        if isinstance(param, click.Argument):
            return "Arguments"
        if {*param.opts}.intersection(self.everyday):
            return "Options"
        if param.name in STORAGE:
            return "Storage options"
        if param.name in COMMON or not isinstance(param, VerbOption):
            return "Common options"
        if param.under:
            return param.under
        for group in self.groups:
            if param.name in group.names and group.type.TITLE != "Options":
                return str(group.type.TITLE)
        return "Further options" if self.everyday else "Options"

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples and the exit codes."""
        with formatter.section("Examples"):
            for line, does in self.examples:
                formatter.write(f"  {line}\n      {does}\n")
        rows = dict.fromkeys(ALWAYS, "") | dict(self.codes)
        with formatter.section("Exit codes"):
            formatter.write_dl(
                [(str(int(c)), rows[c] or MEANINGS[c].meaning) for c in sorted(rows)], col_max=6
            )
