"""`ftckpt completions`: scripts for bash, zsh and fish, generated from the verbs.

The scripts hold the words themselves: pressing TAB starts no Python.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from enum import Enum, StrEnum
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import typer

from ftckpt.commands.cli.invocation import invoked
from ftckpt.commands.cli.parameters import OneOf
from ftckpt.commands.cli.terminal import write
from ftckpt.commands.cli.verbs import HELP, VERBS, load
from ftckpt.errors import ExitCode

STORAGE = False
EXAMPLES = (
    ("ftckpt completions bash > ~/.local/share/bash-completion/completions/ftckpt", "for bash"),
    ("ftckpt completions zsh > ~/.zfunc/_ftckpt", "for zsh, with ~/.zfunc in fpath"),
    ("ftckpt completions fish > ~/.config/fish/completions/ftckpt.fish", "for fish"),
)
CODES = {ExitCode.OK: "printed"}


class Shell(StrEnum):
    """A shell."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def command(
    ctx: typer.Context, shell: Annotated[Shell, typer.Argument(help="Which shell.")]
) -> None:
    """Print the completion script of a shell.

    The package installs these scripts where the shells of the same prefix look for them.
    """
    invocation = invoked(ctx)
    text = script(shell)
    invocation.report(target=shell, script=text)
    if not invocation.json:
        write(sys.stdout, text)


class Flag(NamedTuple):
    """One option of a verb.

    Attributes:
        names: `--level`, `-q`.
        help: one line.
        takes_value: whether a word follows.
        values: the words that may follow, where they are known.
    """

    names: tuple[str, ...]
    help: str
    takes_value: bool
    values: tuple[str, ...]


class VerbWords(NamedTuple):
    """What can follow a verb.

    Attributes:
        verb: its name.
        summary: one line.
        flags: its options.
        words: the words that its argument may be; () means paths.
        paths: whether its argument may be a path as well as one of the words.
    """

    verb: str
    summary: str
    flags: tuple[Flag, ...]
    words: tuple[str, ...]
    paths: bool = False


def words_of_verbs() -> list[VerbWords]:
    """Collect verbs, flags and values from the app."""
    return [_words(load(verb), verb, VERBS) for verb in VERBS]


def _words(loaded: Any, verb: str, verbs: dict[str, str]) -> VerbWords:
    hints = get_type_hints(loaded.module.command, include_extras=True)
    for group in loaded.groups:
        hints |= get_type_hints(group.type, include_extras=True)
    flags: list[Flag] = []
    words: tuple[str, ...] = ()
    for param in loaded.params:
        if getattr(param, "hidden", False):
            continue
        values = _values(hints.get(param.name))
        if param.param_type_name == "argument":
            words = values
        else:
            names = tuple(param.opts) + tuple(param.secondary_opts)
            bare = getattr(loaded.module, "BARE", {}).keys() & set(names)
            flags.append(Flag(names, param.help or "", not (param.is_flag or bare), values))
    flags.append(Flag(HELP, "Show this message and exit.", False, ()))
    if verb == "help":
        words = ("exit-codes", "environment", *_first_words(verbs))
    argued = any(param.param_type_name == "argument" for param in loaded.params)
    paths = argued and not words
    words = words or tuple(second for first, second in _two_words(verbs) if first == verb)
    return VerbWords(verb, verbs[verb], tuple(flags), words, paths)


def _two_words(verbs: Iterable[str]) -> list[list[str]]:
    """Return the verbs of two words, such as `plan sweep`, each split."""
    return [verb.split() for verb in verbs if " " in verb]


def _first_words(verbs: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(verb.split()[0] for verb in verbs))


def _values(hint: Any) -> tuple[str, ...]:
    said = next((one for one in get_args(hint) if isinstance(one, OneOf)), None)
    if said is not None:
        return said.words
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    for one in (hint, *get_args(hint)):
        if isinstance(one, type) and issubclass(one, Enum):
            return tuple(str(member.value) for member in one)
    return ()


def script(shell: str) -> str:
    """Return the completion script of a shell."""
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](_with_families(words_of_verbs()))


def _with_families(verbs: Sequence[VerbWords]) -> list[VerbWords]:
    """Add the first words that are no verbs by themselves, such as `replay` of `replay run`."""
    known = {verb.verb for verb in verbs}
    out: list[VerbWords] = []
    for verb in verbs:
        first = verb.verb.split()[0]
        if first not in known:
            known.add(first)
            words = tuple(b for a, b in _two_words(v.verb for v in verbs) if a == first)
            help_flag = Flag(HELP, "Show this message and exit.", False, ())
            out.append(VerbWords(first, ", ".join(words), (help_flag,), words))
        out.append(verb)
    return out


_HEAD = "# Generated by `ftckpt completions {shell}`; do not edit.\n"
_GLOBAL = ("--version", "--debug", *HELP)


def _bash(verbs: Sequence[VerbWords]) -> str:
    after_flag, flags, arguments = [], [], []
    for verb in verbs:
        free = []
        for flag in verb.flags:
            if flag.values:
                pattern = "|".join(f'"{verb.verb} {name}"' for name in flag.names)
                after_flag.append(f'        {pattern}) words="{" ".join(flag.values)}" ;;')
            elif flag.takes_value:
                free += [f'"{verb.verb} {name}"' for name in flag.names]
        if free:
            after_flag.append(f"        {'|'.join(free)}) return ;;")
        names = " ".join(name for flag in verb.flags for name in flag.names)
        flags.append(f'            "{verb.verb}") words="{names}" ;;')
        if verb.words:
            also = " paths=1" if verb.paths else ""
            arguments.append(f'            "{verb.verb}") words="{" ".join(verb.words)}"{also} ;;')
    new = "\n"
    all_verbs = [verb.verb for verb in verbs]
    two = "|".join(f'"{" ".join(pair)}"' for pair in _two_words(all_verbs))
    return f"""{_HEAD.format(shell="bash")}
_ftckpt() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}}
    local verb= words= paths= i
    COMPREPLY=()
    for ((i = 1; i < COMP_CWORD; i++)); do
        case ${{COMP_WORDS[i]}} in
            -*) ;;
            *) verb=${{COMP_WORDS[i]}}; break ;;
        esac
    done
    if ((i + 1 < COMP_CWORD)); then
        case "$verb ${{COMP_WORDS[i+1]}}" in
            {two}) verb+=" ${{COMP_WORDS[i+1]}}" ;;
        esac
    fi
    case "$verb $previous" in
{new.join(after_flag)}
    esac
    if [[ -z $words && $current == -* ]]; then
        case $verb in
            "") words="{" ".join(_GLOBAL)}" ;;
{new.join(flags)}
        esac
    elif [[ -z $words ]]; then
        case $verb in
            "") words="{" ".join(_first_words(all_verbs))}" ;;
{new.join(arguments)}
        esac
    fi
    # No words: the shell completes file names (-o default).
    if [[ -n $words ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
    fi
    if [[ -n $paths ]]; then
        mapfile -t -O ${{#COMPREPLY[@]}} COMPREPLY < <(compgen -f -- "$current")
        compopt -o filenames 2> /dev/null
    fi
}}

complete -o bashdefault -o default -F _ftckpt ftckpt
"""


def _zsh(verbs: Sequence[VerbWords]) -> str:
    described = "\n".join(
        f"        {_quote(f'{v.verb}:{v.summary}')}" for v in verbs if " " not in v.verb
    )
    two = "|".join(_quote(" ".join(words)) for words in _two_words(v.verb for v in verbs))
    cases = []
    for verb in verbs:
        lines = [f"        {_quote(verb.verb)})", "          _arguments \\"]
        lines += [f"            {_zsh_flag(flag)} \\" for flag in verb.flags]
        action = f"({' '.join(verb.words)})" if verb.words else "_files"
        if verb.words and verb.paths:
            action = f'{{_alternative "verbs:verb:{action}" "files:file:_files"}}'
        lines += [f"            {_quote(f'*:argument:{action}')}", "          ;;"]
        cases.append("\n".join(lines))
    new = "\n"
    return f"""#compdef ftckpt
{_HEAD.format(shell="zsh")}
_ftckpt() {{
  local context state state_descr line
  typeset -A opt_args
  _arguments -C \\
    '--version[Show the version and exit.]' \\
    '--debug[Show tracebacks.]' \\
    '--help[Show this message and exit.]' \\
    '1:verb:->verb' \\
    '*::argument:->argument'
  case $state in
    verb)
      local -a verbs
      verbs=(
{described}
      )
      _describe -t verbs verb verbs
      ;;
    argument)
      local verb=$words[1]
      case "$words[1] $words[2]" in
        {two})
          if (( CURRENT > 2 )); then
            verb="$words[1] $words[2]"
            shift words
            (( CURRENT-- ))
          fi
          ;;
      esac
      case $verb in
{new.join(cases)}
      esac
      ;;
  esac
}}

if [[ $funcstack[1] == _ftckpt ]]; then
  _ftckpt "$@"
else
  compdef _ftckpt ftckpt
fi
"""


def _zsh_flag(flag: Flag) -> str:
    text = flag.help
    for special in ("\\", "[", "]", ":"):
        text = text.replace(special, "\\" + special)
    value = f":value:({' '.join(flag.values)})" if flag.values else ":value:_files"
    value = value if flag.takes_value else ""
    specs = [_quote(f"{name}[{text}]{value}") for name in flag.names]
    return " ".join(specs)


def _fish(verbs: Sequence[VerbWords]) -> str:
    all_verbs = [verb.verb for verb in verbs]
    lines = [_HEAD.format(shell="fish").rstrip(), ""]
    top = "complete -c ftckpt -n __fish_use_subcommand"
    lines += [
        f"{top} -l version -d 'Show the version and exit.'",
        f"{top} -l debug -d 'Show tracebacks.'",
        f"{top} -l help -d 'Show this message and exit.'",
    ]
    lines += [f"{top} -f -a {v.verb} -d {_quote(v.summary)}" for v in verbs if " " not in v.verb]
    for verb in verbs:
        conditions = [f"__fish_seen_subcommand_from {word}" for word in verb.verb.split()]
        second = " ".join(b for a, b in _two_words(all_verbs) if a == verb.verb)
        if second:
            conditions.append(f"not __fish_seen_subcommand_from {second}")
        inside = f"complete -c ftckpt -n {_quote('; and '.join(conditions))}"
        lines.append("")
        for flag in verb.flags:
            names = " ".join(
                f"-l {n[2:]}" if n.startswith("--") else f"-s {n[1:]}" for n in flag.names
            )
            value = ""
            if flag.takes_value:
                # A value with a description of its own, if an empty one, is not given the flag's.
                values = " ".join(f"{one}\\t" for one in flag.values)
                value = f" -x -a {_quote(values)}" if values else " -r"
            lines.append(f"{inside} {names}{value} -d {_quote(flag.help)}")
        if verb.words:
            only = "" if verb.paths else " -f"
            lines.append(f"{inside}{only} -a {_quote(' '.join(verb.words))}")
    return "\n".join(lines) + "\n"


def _quote(text: str) -> str:
    """Quote for all three shells: single quotes, with a quote inside written as double."""
    return "'" + text.replace("'", '"') + "'"
