"""`ftckpt help`: what no single verb's help can say."""

from __future__ import annotations

from typing import Annotated

from ftckpt.commands.cli.invocation import Invocation
from ftckpt.commands.cli.render import MEANINGS, Lines, table
from ftckpt.commands.cli.verbs import all_verbs, family, is_verb, load
from ftckpt.errors import ExitCode, UsageError
from ftckpt.operations.definition import argument, option

STORAGE = False
EXAMPLES = (
    ("ftckpt help exit-codes", "what a script can rely on"),
    ("ftckpt help environment", "how flags are set by environment variables"),
    ("ftckpt help verify", "the same as ftckpt verify --help"),
    ("ftckpt help --man pages", "man pages of all verbs: man -l pages/ftckpt-verify.1"),
)
CODES = {ExitCode.OK: "printed", ExitCode.USAGE: "unknown topic"}


def command(
    invocation: Invocation,
    words: Annotated[list[str] | None, argument("TOPIC|VERB", "What to explain.")] = None,
    man: Annotated[str, option("DIR", "Write all man pages into this directory.")] = "",
) -> None:
    """Explain exit codes, the environment, or a verb.

    Topics: exit-codes, environment, and the name of every verb.
    """
    if man:
        from ftckpt.commands.manual import write_pages

        paths = write_pages(man)
        invocation.report(target=man, text="\n".join(paths))
        invocation.print(f"{len(paths)} pages; man -l {paths[0]} shows the first")
        return
    topic = " ".join(words or ())
    if not topic:
        from ftckpt.commands.cli.root import help_text

        text = help_text()
    elif topic == "exit-codes":
        # The longest column comes last, where a narrow terminal wraps.
        rows = [(int(c), c.name, m.retry, m.meaning) for c, m in MEANINGS.items()]
        text = table(("code>", "name", "retry", "meaning"), rows)
    elif topic == "environment":
        from ftckpt.commands.manual.contents import environment_text

        text = environment_text()
    elif is_verb(topic):
        verb = load(topic)
        with verb.make_context(f"ftckpt {topic}", [], resilient_parsing=True) as its:
            text = verb.get_help(its)
    elif family(topic):
        text = table(("verb", "does"), [(verb, all_verbs()[verb]) for verb in family(topic)])
    else:
        from ftckpt.commands.cli.mistakes import unknown_verb

        raise UsageError(
            unknown_verb(words or ()).message,
            hint="other topics are exit-codes and environment",
        )
    invocation.report(target=topic, text=text)
    invocation.print(Lines(text))
