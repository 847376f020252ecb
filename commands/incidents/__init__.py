"""`ftckpt incidents`: what failed, how often, where, and what did it cost?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.errors import ExitCode
from ftckpt.operations import learning
from ftckpt.operations.definition import option, switch
from ftckpt.storage.local.writable import check_file

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftckpt.joblogs import IncidentReport

operation = learning.incidents


@dataclass(frozen=True, kw_only=True)
class ShownIncidents:
    """What is shown."""

    TITLE: ClassVar[str] = "Options"

    all_: Annotated[bool, switch("--all", "List every incident, not the last 20.")] = False
    html: Annotated[str, option("FILE", "Write one self-contained page.")] = ""


OPTIONS = (ShownIncidents,)


def check(invocation: Invocation, _: Mapping[str, Any]) -> None:
    """Refuse a page that cannot be written, before anything is read.

    Raises:
        UsageError, RefusedError, DeniedError: what is wrong with the file.
    """
    html = invocation.options(ShownIncidents).html
    if html:
        check_file("--html", html)


def render(invocation: Invocation, report: IncidentReport, given: Mapping[str, Any]) -> Result:
    """Print the numbers and the last incidents, and write the page."""
    from .text import headline, text_of

    invocation.close()
    shown = invocation.options(ShownIncidents)
    if report.code is ExitCode.NOT_FOUND:
        hint = "docs/incidents.md lists what is recognised; it does not prove that nothing failed"
        return invocation.fail(report.code, report.message, hint)
    invocation.print(text_of(report, given["timezone"], everything=shown.all_))
    if shown.html:
        from .page import write_page

        write_page(shown.html, report, invocation.document["target"])
        invocation.report(html=shown.html)
        invocation.say(f"page: {shown.html}")
    if report.code is ExitCode.PARTIAL:
        hint = "what stood behind it is not in these numbers"
        return invocation.fail(report.code, report.message, hint)
    return Result(ExitCode.OK, headline(report))
