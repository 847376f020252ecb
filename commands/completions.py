"""`ftckpt completions`: scripts for bash, zsh and fish, generated from the verbs.

The scripts hold verbs, options and most values themselves. What only a look at a place can tell
(steps, tags, tensors, remotes) they ask of `ftckpt __complete` (`commands.completing`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Annotated, Any, NamedTuple

from ftckpt.commands.cli import verbs
from ftckpt.commands.cli.derive import SET
from ftckpt.commands.cli.invocation import Invocation
from ftckpt.commands.cli.terminal import write
from ftckpt.commands.completing import table
from ftckpt.errors import ExitCode, UnsupportedError
from ftckpt.operations.definition import argument

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


def command(invocation: Invocation, shell: Annotated[Shell, argument("", "Which shell.")]) -> None:
    """Print the completion script of a shell.

    The package installs these scripts where the shells of the same prefix look for them.
    """
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
        kind: of the value, where it has to be looked up (`completing.table`); else "".
    """

    names: tuple[str, ...]
    help: str
    takes_value: bool
    values: tuple[str, ...]
    kind: str = ""


class VerbWords(NamedTuple):
    """What can follow a verb.

    Attributes:
        verb: its name.
        summary: one line.
        flags: its options.
        words: the words that its argument may be; () means paths.
        paths: whether its argument may be a path as well as one of the words.
        kinds: of its arguments, in their order; the last may repeat.
    """

    verb: str
    summary: str
    flags: tuple[Flag, ...]
    words: tuple[str, ...]
    paths: bool = False
    kinds: tuple[str, ...] = ()

    @property
    def names_things(self) -> bool:
        """Whether an argument is something else than a place."""
        return bool({*self.kinds} - {"place"})


_HELPS = (
    Flag(("-h",), "Show what is needed every day.", False, ()),
    Flag(("--help",), "Show everything.", False, ()),
)


def _before_the_verb() -> list[Flag]:
    from ftckpt.commands.cli.derive import before_the_verb

    flags = [Flag(("--version",), "Show the version and exit.", False, ()), *_HELPS]
    for one in before_the_verb():
        words: tuple[str, ...] = getattr(one, "words", ())
        flags.append(Flag(tuple(one.opts), one.help or "", not one.is_flag, words))
    return flags


def words_of_verbs() -> list[VerbWords]:
    """Collect verbs, flags and values from the app."""
    found = []
    for verb in verbs.names():
        with suppress(UnsupportedError):  # another package's, and it does not work
            found.append(_words(verbs.load(verb), verb))
    return found


def _words(loaded: Any, verb: str) -> VerbWords:
    flags: list[Flag] = []
    words: tuple[str, ...] = ()
    argued = False
    assumed = tuple(
        f"{name.removeprefix(SET).strip()}=" for param in loaded.params for name in param.opts
        if name.startswith(f"{SET} ")
    )  # fmt: skip
    for param in loaded.params:
        if getattr(param, "hidden", False) or any(" " in name for name in param.opts):
            continue
        values = param.words
        if param.param_type_name == "argument":
            words = values
            argued = True
        else:
            names = tuple(param.opts) + tuple(param.secondary_opts)
            takes = not (param.is_flag or param.bare)
            long = next(name for name in names if name.startswith("--"))
            if long == "--family":
                values = _families()
            kind = table.option_kind(verb, long) if takes and not values else ""
            flags.append(Flag(names, param.help or "", takes, values, kind))
    if assumed:
        flags.append(Flag((SET,), "Set what few people know.", True, assumed))

    flags += _HELPS
    if verb == "help":
        words = ("exit-codes", "environment", *_first_words(verbs.names()))
    elif verb == "config":
        words = tuple(_first_words(verbs.names()))
    kinds = table.ARGUMENTS.get(verb, ("place",)) if argued and not words else ()
    paths = argued and not words
    words = words or tuple(second for first, second in _two_words(verbs.names()) if first == verb)
    summary = verbs.VERBS.get(verb) or verbs.summary(verb)
    return VerbWords(verb, summary, tuple(flags), words, paths, kinds)


def _families() -> tuple[str, ...]:
    from ftckpt.formats.families.tables import family_names

    return family_names()


def _two_words(names: Iterable[str]) -> list[list[str]]:
    """Return the verbs of two words, such as `plan sweep`, each split."""
    return [verb.split() for verb in names if " " in verb]


def _first_words(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(verb.split()[0] for verb in names))


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
            out.append(VerbWords(first, ", ".join(words), _HELPS, words))
        out.append(verb)
    return out


_HEAD = "# Generated by `ftckpt completions {shell}`; do not edit.\n"
# Where remotes may be named; without it, a word without a slash starts no Python.
_CONFIG = "${FTCKPT_CONFIG:-${XDG_CONFIG_HOME:-$HOME/.config}/ftckpt/config.toml}"
_CONFIG_FISH = (
    '(test -n "$FTCKPT_CONFIG"; and echo $FTCKPT_CONFIG; or begin; '
    'test -n "$XDG_CONFIG_HOME"; and echo $XDG_CONFIG_HOME/ftckpt/config.toml; '
    "or echo ~/.config/ftckpt/config.toml; end)"
)


def _bash(verbs: Sequence[VerbWords]) -> str:
    after_flag, flags, arguments = [], [], []
    all_verbs = [verb.verb for verb in verbs]
    before = tuple(_before_the_verb())
    valued = "|".join(name for flag in before if flag.takes_value for name in flag.names)
    for verb in (VerbWords("", "", before, tuple(_first_words(all_verbs))), *verbs):
        free, asked = [], []
        for flag in verb.flags:
            names = [f'"{verb.verb} {name}"' for name in flag.names]
            if flag.values:
                after_flag.append(f'        {"|".join(names)}) words="{" ".join(flag.values)}" ;;')
            elif flag.kind:
                asked += names
            elif flag.takes_value:
                free += names
        if asked:
            after_flag.append(f"        {'|'.join(asked)}) ask=1 ;;")
        if free:
            after_flag.append(f"        {'|'.join(free)}) return ;;")
        names_of_all = " ".join(name for flag in verb.flags for name in flag.names)
        flags.append(f'            "{verb.verb}") words="{names_of_all}" ;;')
        if verb.words:
            also = " paths=1" if verb.paths else ""
            arguments.append(f'            "{verb.verb}") words="{" ".join(verb.words)}"{also} ;;')
        elif verb.names_things:
            arguments.append(f'            "{verb.verb}") ask=1 ;;')
    new = "\n"
    two = "|".join(f'"{" ".join(pair)}"' for pair in _two_words(all_verbs))
    return f"""{_HEAD.format(shell="bash")}
_ftckpt() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}}
    local line=${{COMP_LINE:0:COMP_POINT}}
    local whole=${{line##*[[:space:]]}} verb= words= paths= ask= i
    COMPREPLY=()
    # `=` is a word of its own here.
    if [[ $current == = ]]; then
        current=
    elif [[ $previous == = ]] && ((COMP_CWORD > 2)); then
        previous=${{COMP_WORDS[COMP_CWORD-2]}}
    fi
    for ((i = 1; i < COMP_CWORD; i++)); do
        case ${{COMP_WORDS[i]}} in
            {valued}) [[ ${{COMP_WORDS[i+1]}} == = ]] && ((i++)); ((i++)) ;;
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
    # A step, a URL or a remote: `@` and `:` are words of their own too.
    [[ -n $verb && -z $words && $whole == *[@:]* ]] && ask=1
    if [[ -z $words$ask && $current == -* ]]; then
        case $verb in
{new.join(flags)}
        esac
    elif [[ -z $words$ask ]]; then
        case $verb in
{new.join(arguments)}
            *) [[ $whole != */* && -e {_CONFIG} ]] && ask=1 ;;
        esac
    fi
    if [[ -n $ask ]]; then
        local -a found
        local program=${{1/#\\~/$HOME}}
        # An alias, or a program that runs another, is not what answers.
        [[ ${{program##*/}} == ftckpt ]] || program=ftckpt
        mapfile -t found < <("$program" __complete bash "$line" "$2" 2> /dev/null)
        case ${{found[0]-}} in
            files) ;;
            *)
                # No file is meant, and no host either, which bash would offer after an `@`.
                compopt +o default +o bashdefault -o nosort 2> /dev/null
                [[ ${{found[0]-}} == nospace ]] && compopt -o nospace 2> /dev/null
                COMPREPLY=("${{found[@]:1}}")
                ;;
        esac
        return
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
        action = f"({' '.join(verb.words)})" if verb.words else "_ftckpt_place"
        if verb.words and verb.paths:
            action = f'{{_alternative "verbs:verb:{action}" "places:place:_ftckpt_place"}}'
        elif verb.names_things:
            action = "_ftckpt_ask"
        lines += [f"            {_quote(f'*:argument:{action}')}", "          ;;"]
        cases.append("\n".join(lines))
    new = "\n"
    return f"""#compdef ftckpt
{_HEAD.format(shell="zsh")}
# What only a look at a place can tell; names of files where the answer is that.
_ftckpt_ask() {{
  local -a found before end
  before=(${{(z)verb}} "${{(@Q)words[2,CURRENT-1]}}")
  found=("${{(@f)$("$program" __complete zsh "$compstate[quote]" "$PREFIX" \\
    "$before[@]" "${{(Q)IPREFIX}}${{(Q)PREFIX}}" 2> /dev/null)}}")
  case $found[1] in
    files) _files; return ;;
    nospace) end=(-S '') ;;
    words) ;;
    *) return 1 ;;
  esac
  shift found
  (( $#found )) && compadd -Q -V found "$end[@]" -- "$found[@]"
}}

_ftckpt_place() {{
  if [[ $PREFIX == *[@:]* ]] || [[ $PREFIX != */* && -e {_CONFIG} ]]; then
    _ftckpt_ask
  else
    _files
  fi
}}

_ftckpt() {{
  local context state state_descr line program=${{~words[1]}}
  # An alias, or a program that runs another, is not what answers.
  [[ ${{program:t}} == ftckpt ]] || program=ftckpt
  typeset -A opt_args
  _arguments -C \\
{new.join(f"    {_zsh_flag(flag)} {chr(92)}" for flag in _before_the_verb())}
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
    action = {"": "_files", "place": "_ftckpt_place"}.get(flag.kind, "_ftckpt_ask")
    if flag.values:
        action = f"({' '.join(flag.values)})"
    value = f":value:{action}" if flag.takes_value else ""
    specs = [
        # With the sign, `--flag=value` is taken as well.
        _quote(f"{name}{'=' * (flag.takes_value and name.startswith('--'))}[{text}]{value}")
        for name in flag.names
    ]
    return " ".join(specs)


_FISH_ASK = f"""
# What only a look at a place can tell; names of files where the answer is that.
function __ftckpt_ask
    set -l words (commandline -opc)
    # An alias, or a program that runs another such as sudo, is not what answers.
    set -l program ftckpt
    while set -q words[1]; and not string match -q -r '(^|/)ftckpt$' -- $words[1]
        set -e words[1]
    end
    set -q words[1]; and set program $words[1]
    command -q $program; or return
    set -l current (commandline -ct | string unescape)
    set -l found ($program __complete fish $words[2..-1] "$current" 2> /dev/null)
    if test "$found[1]" = files
        __fish_complete_path (commandline -ct)
    else
        printf '%s\\n' $found[2..-1]
    end
end

# The same beside names of files, which fish completes itself.
function __ftckpt_place
    set -l current (commandline -ct)
    set -l config {_CONFIG_FISH}
    if string match -q -r '[@:]' -- $current
        or begin; not string match -q -r / -- $current; and test -e $config; end
        __ftckpt_ask
    end
end
"""


def _fish(verbs: Sequence[VerbWords]) -> str:
    all_verbs = [verb.verb for verb in verbs]
    lines = [_HEAD.format(shell="fish").rstrip(), _FISH_ASK]
    top = "complete -c ftckpt -n __fish_use_subcommand"
    lines += [f"{top} {_fish_flag(flag)}" for flag in _before_the_verb()]
    lines += [f"{top} -f -a {v.verb} -d {_quote(v.summary)}" for v in verbs if " " not in v.verb]
    for verb in verbs:
        conditions = [f"__fish_seen_subcommand_from {word}" for word in verb.verb.split()]
        second = " ".join(b for a, b in _two_words(all_verbs) if a == verb.verb)
        if second:
            conditions.append(f"not __fish_seen_subcommand_from {second}")
        inside = f"complete -c ftckpt -n {_quote('; and '.join(conditions))}"
        lines.append("")
        for flag in verb.flags:
            lines.append(f"{inside} {_fish_flag(flag)}")
        if verb.words:
            only = "" if verb.paths else " -f"
            lines.append(f"{inside}{only} -a {_quote(' '.join(verb.words))}")
        if verb.names_things:
            lines.append(f"{inside} -f -k -a '(__ftckpt_ask)'")
        elif verb.kinds:
            lines.append(f"{inside} -k -a '(__ftckpt_place)'")
    return "\n".join(lines) + "\n"


def _fish_flag(flag: Flag) -> str:
    names = " ".join(f"-l {n[2:]}" if n.startswith("--") else f"-s {n[1:]}" for n in flag.names)
    value = ""
    if flag.takes_value:
        # A value with a description of its own, if an empty one, is not given the flag's.
        values = " ".join(f"{one}\\t" for one in flag.values)
        if flag.kind:
            values = "(__ftckpt_ask)"
        value = f" -x -a {_quote(values)}" if values else " -r"
    return f"{names}{value} -d {_quote(flag.help)}"


def _quote(text: str) -> str:
    """Quote for all three shells: single quotes, with a quote inside written as double."""
    return "'" + text.replace("'", '"') + "'"
