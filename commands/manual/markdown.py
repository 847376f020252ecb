"""Pages of the site about verbs, of the same tables as the help and the man pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ftckpt.commands.cli.verbs import VERBS

from .contents import verb_help


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
