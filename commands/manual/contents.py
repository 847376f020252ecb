"""What a page about a verb says, of the same tables as its help."""

from __future__ import annotations

from typing import NamedTuple

from ftckpt.commands.cli.codes import ALWAYS, MEANINGS
from ftckpt.commands.cli.verbs import family, load
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
        found: dict[str, list[tuple[str, str]]] = {}
        for param in command.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                found.setdefault(command.section_of(param), []).append(record)
    sections = [(n, tuple(found[n])) for n in command.section_names() if n in found]
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
