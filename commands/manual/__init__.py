"""Man pages, made of the same tables as the help: one a verb, two for what all share.

`ftckpt help --man DIR` writes them; a wheel holds them in share/man.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping

from ftckpt.commands.cli.render import MEANINGS
from ftckpt.commands.cli.verbs import VERBS, all_verbs
from ftckpt.errors import PRECEDENCE
from ftckpt.version import __version__

from .contents import bold, environment_text, example, paragraphs, plain, rows, verb_help


def pages(verbs: Mapping[str, str] = VERBS) -> Iterator[tuple[str, str]]:
    """Yield each page: its name, such as `ftckpt-gc-undelete.1`, and its text.

    Args:
        verbs: with their summaries.
    """
    made = {"ftckpt.1": _overview(verbs)}
    made |= {f"{_page(verb)}.1": _verb(verb) for verb in verbs}
    made |= {"ftckpt-exit-codes.7": _exit_codes(), "ftckpt-environment.7": _environment()}
    for name, text in made.items():
        # A heading begins a paragraph already.
        yield name, re.sub(r"(?m)^(\.SH .*\n)\.PP\n", r"\1", text)


def write_pages(folder: str) -> list[str]:
    """Write all pages into a folder, which is made, and return their paths."""
    os.makedirs(folder, exist_ok=True)
    paths = []
    for name, text in pages(all_verbs(broken=False)):
        paths.append(os.path.join(folder, name))
        with open(paths[-1], "w", encoding="utf-8") as file:
            file.write(text)
    return paths


def _page(verb: str) -> str:
    return f"ftckpt-{verb.replace(' ', '-')}"


def _head(name: str, section: int, summary: str) -> str:
    # A build that can be repeated says when (reproducible-builds.org).
    when = time.gmtime(int(os.environ.get("SOURCE_DATE_EPOCH", time.time())))
    date = time.strftime("%Y-%m-%d", when)
    head = f'.TH {name.upper()} {section} {date} "ftckpt {__version__}" "ftckpt manual"\n'
    # Words are neither broken nor stretched: they are names and flags.
    return f"{head}.nh\n.ad l\n.SH NAME\n{plain(name)} \\- {plain(summary)}\n"


def _see_also(names: Iterable[str]) -> str:
    linked = (f".BR {plain(one)} ({section})" for one, section in _sections(names))
    return ".SH SEE ALSO\n" + " ,\n".join(linked) + "\n"


def _sections(names: Iterable[str]) -> Iterator[tuple[str, int]]:
    for name in names:
        yield name, 7 if name in ("ftckpt-exit-codes", "ftckpt-environment") else 1


_ALL = ("ftckpt-exit-codes", "ftckpt-environment")


def _overview(verbs: Mapping[str, str]) -> str:
    return (
        _head("ftckpt", 1, "operate the checkpoints of large-model training")
        + f".SH SYNOPSIS\n{bold('ftckpt')} [{bold('--version')}] [{bold('--debug')}]"
        + " \\fIVERB\\fR ...\n"
        + ".SH DESCRIPTION\n"
        + paragraphs(
            "ftckpt shows what is in a checkpoint, checks whether it can be trusted, and finds "
            "the newest good one. It works offline, on local disk and object storage, without the "
            "framework that wrote the files, and never runs code from a file."
        )
        + ".SH VERBS\n"
        + rows((bold(verb), plain(does)) for verb, does in verbs.items())
        + _see_also([*map(_page, verbs), *_ALL])
    )


def _verb(verb: str) -> str:
    told = verb_help(verb)
    return (
        _head(_page(verb), 1, told.summary)
        + f".SH SYNOPSIS\n{bold(f'ftckpt {verb}')} {plain(told.usage)}\n"
        + ".SH DESCRIPTION\n"
        + paragraphs(f"{told.summary}.", told.text)
        + "".join(
            f".SH {plain(name.upper())}\n" + rows((bold(n), plain(h)) for n, h in options)
            for name, options in told.sections
        )
        + ".SH EXAMPLES\n"
        + "".join(paragraphs(does) + example(line) for line, does in told.examples)
        + ".SH EXIT STATUS\n"
        + rows((bold(str(int(code))), plain(f"{code.name}: {text}")) for code, text in told.codes)
        + _see_also(["ftckpt", *map(_page, told.others), *_ALL])
    )


def _exit_codes() -> str:
    order = ", ".join(str(int(code)) for code in PRECEDENCE if code)
    meanings = (
        (bold(f"{int(code)} {code.name}"), plain(f"{one.meaning}; retry: {one.retry}"))
        for code, one in MEANINGS.items()
    )
    return (
        _head("ftckpt-exit-codes", 7, "what a script can rely on")
        + ".SH DESCRIPTION\n"
        + paragraphs("Every verb of ftckpt ends with one of these. Only 0 is a positive answer.")
        + rows(meanings)
        + paragraphs(f"Where several apply, the first of this order is taken: {order}.")
        + _see_also(["ftckpt", "ftckpt-environment"])
    )


def _environment() -> str:
    text = re.sub(r"(?m)^  (\S.*)$", r"\n  \1", environment_text())
    return (
        _head("ftckpt-environment", 7, "how options are set by variables and by a file")
        + ".SH DESCRIPTION\n"
        + paragraphs(text)
        + _see_also(["ftckpt", "ftckpt-config", "ftckpt-exit-codes"])
    )
