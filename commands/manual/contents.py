"""What a page about a verb says, of the same tables as its help.

What is to be known of environment variables, for `ftckpt help environment` and its man page.

Pages of the site about verbs, of the same tables as the help and the man pages.

Text for man pages, with everything that roff would take as its own escaped.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ftckpt.commands.cli.environment import environment_name
from ftckpt.commands.cli.render import ALWAYS, MEANINGS
from ftckpt.commands.cli.verbs import VERBS, family, load
from ftckpt.errors import ExitCode


class VerbHelp(NamedTuple):
    """One verb.

    Attributes:
        summary: one line, without its full stop.
        text: the paragraphs that follow.
        usage: what stands behind the verb.
        sections: a heading, and each argument or option below it with its words.
        examples: command lines, each with what it does.
        codes: exit codes with what they mean here.
        others: the verbs of the same family.
    """

    summary: str
    text: str
    usage: str
    sections: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
    examples: tuple[tuple[str, str], ...]
    codes: tuple[tuple[ExitCode, str], ...]
    others: tuple[str, ...]


def verb_help(verb: str) -> VerbHelp:
    """Return what is to be said about a verb."""
    command = load(verb)
    summary, _, rest = (command.help or "").strip().partition("\n")
    with command.make_context(f"ftckpt {verb}", [], resilient_parsing=True) as ctx:
        usage = " ".join(command.collect_usage_pieces(ctx))
        sections = [(name, tuple(rows)) for name, rows in command.sections(ctx).items()]
    said = dict.fromkeys(ALWAYS, "") | dict(command.codes)
    return VerbHelp(
        summary=summary.rstrip("."),
        text=rest.strip(),
        usage=usage,
        sections=tuple(sections),
        examples=tuple(command.examples),
        codes=tuple((code, said[code] or MEANINGS[code].meaning) for code in sorted(said)),
        others=tuple(one for one in family(verb.split()[0]) if one != verb),
    )


_TEXT = """\
Common and storage options have a variable each, for every verb:
{names}.
On/off options take 1 and 0. An option on the command line wins. The variables that were used are
listed under "environment" in the JSON answer. Any other name that begins with FTCKPT_ is refused
(2), with the nearest that is known: a misspelt one would set nothing, in silence. Excepted are
FTCKPT_REPLAY_*, which `ftckpt replay` gives to the processes that it records, and the names that
Kubernetes makes for a Service (FTCKPT_SERVICE_HOST, ...).

Other options have none: what a verb does, and which check it skips, is said where it is called.
Defaults for speed, memory and alerts stand in the file of settings (ftckpt config).

ftckpt also honours
  FTCKPT_CONFIG         the file of settings; else ~/.config/ftckpt/config.toml (ftckpt config)
  NO_COLOR              no colours
  TERM=dumb             no colours and no progress bar
  AWS_PROFILE, AWS_REGION, AWS_ENDPOINT_URL, AWS_ENDPOINT_URL_S3, AWS_ACCESS_KEY_ID and the
                        other variables of the AWS configuration, for s3:// paths"""


def environment_text() -> str:
    """Return what is to be known of variables that set options."""
    from ftckpt.commands.cli.derive import COMMON, STORAGE

    names = sorted(environment_name(one.replace("_", "-")) for one in COMMON | STORAGE)
    # Broken as the lines around it are.
    return _TEXT.format(names=textwrap.fill(", ".join(names), 99, break_on_hyphens=False))


def markdown_pages(verbs: Iterable[str] = VERBS) -> Iterator[tuple[str, str]]:
    """Yield each page: its path, such as `verbs/gc-undelete.md`, and its text."""
    for verb in verbs:
        yield f"verbs/{_file(verb)}", _page(verb)


def _file(verb: str) -> str:
    return f"{verb.replace(' ', '-')}.md"


def _page(verb: str) -> str:
    told = verb_help(verb)
    text = f"# {verb}\n\n{_plain(told.summary)}.\n\n"
    text += f"```text\nftckpt {verb} {told.usage}\n```\n\n{_plain(told.text)}\n\n"
    text += "## Examples\n\n"
    for line, does in told.examples:
        text += f"{_plain(does)}:\n\n```sh\n{line}\n```\n\n"
    for name, options in told.sections:
        text += f"## {name}\n\n| | |\n|---|---|\n"
        text += "".join(f"| {_code(option)} | {_cell(words)} |\n" for option, words in options)
        text += "\n"
    text += "## Exit codes\n\n| code | here |\n|---|---|\n"
    text += "".join(f"| {int(code)} {code.name} | {_cell(words)} |\n" for code, words in told.codes)
    text += "\n[What a script can rely on](../exit-codes.md)"
    if told.others:
        text += "; see also " + ", ".join(f"[{one}]({_file(one)})" for one in told.others)
    return text + "\n"


def _plain(text: str) -> str:
    """Return words in which markdown finds no markup but code."""
    return text.replace("<", "&lt;").replace("*", "\\*")


def _cell(text: str) -> str:
    return _plain(" ".join(text.split())).replace("|", "\\|").replace("_", "\\_")


def _code(text: str) -> str:
    return "`" + " ".join(text.split()).replace("|", "\\|") + "`"


_SPECIAL = {
    "\\": "\\e",
    "-": "\\-",
    "'": "\\(aq",
    "`": "\\(ga",
    "^": "\\(ha",
    "~": "\\(ti",
}


def plain(text: str) -> str:
    """Return words of one line as they are to be read; no line of it is a request."""
    words = " ".join(text.split())
    out = "".join(_SPECIAL.get(one, one if one.isascii() else _named(one)) for one in words)
    return f"\\&{out}" if out.startswith(".") else out


def _named(letter: str) -> str:
    return f"\\[u{ord(letter):04X}]"


def bold(text: str) -> str:
    """Return words in bold."""
    return f"\\fB{plain(text)}\\fR"


def paragraphs(*texts: str) -> str:
    """Return paragraphs; an empty line separates them in a text too."""
    blocks = [one for text in texts for one in re.split(r"\n\s*\n", text) if one.strip()]
    return "".join(f".PP\n{plain(one)}\n" for one in blocks)


def rows(pairs: Iterable[tuple[str, str]]) -> str:
    """Return a list of terms, each with its words; both are roff already."""
    return "".join(f".TP\n{term}\n{words}\n" for term, words in pairs)


def example(line: str) -> str:
    """Return a command line, unbroken and indented."""
    return f".PP\n.RS 4\n.nf\n{plain(line)}\n.fi\n.RE\n"
