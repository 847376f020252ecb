"""What a command line without a verb gets: the version, or the help with the list of verbs."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ftckpt.version import __version__

from .environment import HELP
from .overview import all_help
from .terminal import write


class VerbList(TyperGroup):
    """The list of verbs; each is parsed by itself (`derive`)."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the verbs under their headings, of ours from the static table."""
        formatter.write(help_text())


app = typer.Typer(
    name="ftckpt",
    cls=VerbList,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": list(HELP)},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        write(sys.stdout, f"ftckpt {__version__}\n")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", is_eager=True, callback=_print_version,
            help="Show the version and exit.",
        ),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:  # fmt: skip
    """Take what may stand before a verb."""


def answer(words: list[str]) -> None:
    """Print what options without a verb ask for: the version or the help."""
    typer.main.get_command(app).main(words, "ftckpt", standalone_mode=False)


def help_text() -> str:
    """Return the help of the whole."""
    return all_help()
