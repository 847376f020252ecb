"""Which fields of a report its JSON document has; `observer.Observer.report` sets them earlier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from operator import attrgetter
from typing import Annotated, Any, NamedTuple


class AtLeast(NamedTuple):
    """The least number that a field has, for the schema of its document."""

    value: int


class GivenWords(NamedTuple):
    """The texts that a field has, for the schema of its document."""

    values: tuple[str, ...]


Natural = Annotated[int, AtLeast(0)]
Amount = Annotated[float, AtLeast(0)]

# What a field is: of Python alone; of the document where it is not None; or where it is not empty;
# a report whose fields the document has; an exit code as its number, with its `name` beside it.
UNSAID: Mapping[str, str] = {"said": "never"}
IF_ANY: Mapping[str, str] = {"said": "if any"}
IF_SOME: Mapping[str, str] = {"said": "if some"}
INLINE: Mapping[str, str] = {"said": "inline"}
CODED: Mapping[str, str] = {"said": "coded"}


def said_as(name: str) -> Mapping[str, str]:
    """Return what gives a field another name in the document."""
    return {"as": name}


def document(report: Any) -> dict[str, Any]:
    """Return the fields of a report that a JSON document has.

    A class names in `SAID` what else the document has: properties, or the names of fields with
    where each is (`{"step": "entry.step"}`).
    """
    found: dict[str, Any] = {}
    if getattr(report, "reported", False):  # while it was made
        return found
    for one in fields(report):
        value, said = getattr(report, one.name), one.metadata.get("said")
        if said == "never" or (said and value is None) or (said == "if some" and not value):
            continue
        if said == "inline":
            found |= document(value)
        elif said == "coded":
            found |= {"code": int(value), "name": value.name}
        else:
            found[one.metadata.get("as", one.name)] = value
    also = getattr(report, "SAID", ())
    for name in also:
        found[name] = attrgetter(also[name] if isinstance(also, Mapping) else name)(report)
    return found
