"""Which fields of a report its JSON document has; `observer.Observer.report` sets them earlier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

# What a field is: of Python alone; of the document where it is not None; or where it is not empty;
# an exit code as its number, with its `name` beside it.
UNSAID: Mapping[str, str] = {"said": "never"}
IF_ANY: Mapping[str, str] = {"said": "if any"}
IF_SOME: Mapping[str, str] = {"said": "if some"}
CODED: Mapping[str, str] = {"said": "coded"}


def said_as(name: str) -> Mapping[str, str]:
    """Return what gives a field another name in the document."""
    return {"as": name}


def document(report: Any) -> dict[str, Any]:
    """Return the fields of a report that a JSON document has.

    A class names its properties that the document has, too, in `SAID`.
    """
    found: dict[str, Any] = {}
    if getattr(report, "reported", False):  # while it was made
        return found
    for one in fields(report):
        value, said = getattr(report, one.name), one.metadata.get("said")
        if said == "never" or (said and value is None) or (said == "if some" and not value):
            continue
        if said == "coded":
            found |= {"code": int(value), "name": value.name}
            continue
        found[one.metadata.get("as", one.name)] = value
    for name in getattr(report, "SAID", ()):
        found[name] = getattr(report, name)
    return found
