"""What a command line without a verb gets: the version, or the help with the list of verbs."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ftckpt.errors import UsageError
from ftckpt.version import __version__

from .environment import HELP
from .terminal import write
from .verbs import all_verbs


class VerbList(TyperGroup):
    """The list of verbs; each is parsed by itself (`derive`)."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the verbs, of ours from the static table."""
        with formatter.section("Verbs"):
            formatter.write_dl(list(all_verbs().items()))


app = typer.Typer(
    name="ftckpt",
    cls=VerbList,
    help="Checkpoint operations for large-model training.",
    epilog="ftckpt VERB --help explains a verb, ftckpt help exit-codes what scripts can rely on.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    subcommand_metavar="VERB ...",
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
    """Print what options without a verb ask for.

    Raises:
        UsageError: it is not an option of the program.
    """
    try:
        typer.main.get_command(app).main(words, "ftckpt", standalone_mode=False)
    except Exception as error:
        said = getattr(error, "format_message", None)
        if said is None:
            raise
        raise UsageError(" ".join(said().split()).rstrip("."), hint="see ftckpt --help") from error


def help_text() -> str:
    """Return the help of the whole."""
    root = typer.main.get_command(app)
    with root.make_context("ftckpt", ["--version"], resilient_parsing=True) as ctx:
        return str(root.get_help(ctx))
