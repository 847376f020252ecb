"""The JSON schema of an answer, made of the report's fields: `python -m ftckpt.operations.schemas`.

Only for development: what is written to docs/schemas is kept there, and a test compares it. A
field's sentence in the docstring of its class is its description, and what `ftckpt.reports` says of
a field holds here too.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache, cached_property
from importlib import import_module
from inspect import cleandoc, signature, unwrap
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from ftckpt.errors import ExitCode
from ftckpt.reports import AtLeast, GivenWords

from . import HOMES
from .definition import Opt

Schema = dict[str, Any]

# The operations whose schemas are made here; the others are still kept by hand.
MADE = (
    "delta_info",
    "doctor",
    "du",
    "gc_purge",
    "replay_audit",
    "scrub",
    "seal",
    "verify",
)
_ABOUT = {"ROOT": "the root", "SRC": "the source"}


class _Result(NamedTuple):
    """How a run ended.

    Attributes:
        code: the exit code of the process.
        name: of that code.
        message: the answer in a sentence.
        hint: what to do next; may be empty.
    """

    code: int
    name: str
    message: str
    hint: str


class _Cluster(NamedTuple):
    """Who did the parts.

    Attributes:
        name: of the cluster.
        shares: parts.
    """

    name: str
    shares: int


def schema_of(name: str) -> Schema:
    """Return the schema of the answer of an operation, by its name: `gc_purge`."""
    operation = getattr(import_module(f"ftckpt.operations.{HOMES[name]}"), name)
    hints = _hints(unwrap(operation))
    defs: dict[str, Schema] = {}
    own, always = _properties(hints["return"], defs)
    takes = signature(operation).parameters
    verb = name.replace("_", "-")
    found: Schema = {"schema": {"const": f"ftckpt.{verb}/1"}}
    # Of a wrong command line nothing is known, also where a report always has a target.
    own.pop("target", None)
    about = _about(hints[next(iter(takes))])
    found["target"] = _described({"type": ["string", "null"]}, about)
    if "also" in takes:
        found["also"] = _described(
            {"type": "array", "items": {"type": "string"}},
            "further places of the same checkpoint (--also)",
        )
    found["format"] = own.pop("format", None) or {"type": ["string", "null"]}
    found |= _common()
    found |= own
    if "division" in takes:
        from .many import PartReport

        of_part, _ = _properties(PartReport, defs)
        for one, said in of_part.items():
            there: Schema = found[one] if one in found else said  # noqa: SIM401  (mypy)
            bare = [{**kind, "description": ""} for kind in (there, said)]
            found[one] = there if bare[0] == bare[1] else _one_of([there, said])
        found["cluster"] = _described(
            _schema(_Cluster, defs), "the cluster that did the parts (--cluster)"
        )
    found["result"] = _schema(_Result, defs)
    done: Schema = {"properties": {"result": {"properties": {"code": {"const": 0}}}}}
    if "division" in takes:
        done["not"] = {"required": ["part"]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"ftckpt {name.replace('_', ' ')} --json",
        "type": "object",
        "required": ["schema", "target", "format", "result"],
        "properties": found,
        "additionalProperties": False,
        "if": done,
        "then": {"required": [one for one in always if one not in ("target", "format")]},
        "$defs": defs,
    }


def _common() -> Schema:
    """Return what each answer may have: what the environment and the settings have said."""
    remotes = {
        "type": "object",
        "required": ["url"],
        "properties": {
            **{one: {"type": "string"} for one in ("url", "endpoint", "profile", "region")},
            **{one: {"type": "boolean"} for one in ("requester_pays", "anonymous")},
            **{one: {"type": "number"} for one in ("retry_seconds", "timeout")},
        },
        "additionalProperties": False,
    }
    return {
        "environment": _described(
            {"type": "object", "additionalProperties": {"type": "string"}},
            "environment variables that set flags of this run",
        ),
        "settings": _described({"type": "object"}, "options that the file of settings has set"),
        "remotes": _described(
            {"type": "object", "additionalProperties": remotes},
            "named remotes on the command line (docs/storage.md)",
        ),
    }


def _about(place: Any) -> str:
    """Return what the answer is about, by what stands for the first argument."""
    said = [one.metavar for one in getattr(place, "__metadata__", ()) if isinstance(one, Opt)]
    return _ABOUT.get(said[0] if said else "", "what the answer is about")


def _properties(of: type[Any], defs: dict[str, Schema]) -> tuple[Schema, list[str]]:
    """Return the properties of a report's document, and the names of those it always has."""
    found: Schema = {}
    always: list[str] = []
    hints, docs = _hints(of), _docs(of)
    metadata: dict[str, Mapping[str, Any]] = (
        {one.name: one.metadata for one in fields(of)}
        if is_dataclass(of)
        else {name: {} for name in of._fields}
    )
    for name, about in metadata.items():
        said = about.get("said")
        if said == "never":
            continue
        if said == "inline":
            more, needed = _properties(_without_none(hints[name]), defs)
            found |= more
            always += needed
            continue
        if said == "coded":
            found |= {"code": {"type": "integer"}, "name": {"type": "string"}}
            always += ["code", "name"]
            continue
        hint = _without_none(hints[name]) if said else hints[name]
        shown = about.get("as", name)
        found[shown] = _described(_schema(hint, defs), docs.get(name, ""))
        if not said:
            always.append(shown)
    also = getattr(of, "SAID", ())
    for name in also:
        at: Any = of
        for one in (also[name] if isinstance(also, Mapping) else name).split("."):
            home, at = at, _type_at(at, one)
        text = _docs(home).get(one) or _sentence(getattr(home, one, None))
        found[name] = _described(_schema(at, defs), text)
        always.append(name)
    return found, always


def _type_at(of: Any, name: str) -> Any:
    """Return the type of a field or a property of a class."""
    there = getattr(of, name, None)
    if isinstance(there, property | cached_property):
        return _hints(there.fget if isinstance(there, property) else there.func)["return"]
    return _hints(of)[name]


def _sentence(there: Any) -> str:
    text = cleandoc(there.__doc__ or "") if isinstance(there, property | cached_property) else ""
    said = text.partition("\n\n")[0].removesuffix(".").replace("\n", " ")
    return said[:1].lower() + said[1:]


def _schema(hint: Any, defs: dict[str, Schema]) -> Schema:
    """Return the schema of a value of this type, as `json_text` writes it."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        found = _schema(inner[0], defs)
        for one in inner[1:]:
            if isinstance(one, AtLeast):
                found = found | {"minimum": one.value}
            elif isinstance(one, GivenWords):
                found = {"enum": list(one.values)}
        return found
    if hint is Any or hint is object:
        return {}
    if origin in (Union, UnionType):
        return _one_of([_schema(one, defs) for one in inner])
    if origin is Literal:
        return {"enum": list(inner)}
    simple = {bool: "boolean", int: "integer", float: "number", NoneType: "null"}
    if hint in simple:
        return {"type": simple[hint]}
    if hint in (str, bytes, ExitCode):
        return {"type": "string"}  # of an exit code its name
    kind = origin or hint
    if issubclass(kind, Enum):
        return {"enum": [one.value for one in kind]}
    if is_dataclass(kind) or hasattr(kind, "_fields"):
        return _defined(kind, defs)
    if issubclass(kind, Mapping):
        return {"type": "object", "additionalProperties": _schema(inner[1], defs)}
    if issubclass(kind, Iterable):
        if issubclass(kind, tuple) and inner[-1] is not ...:
            return {"type": "array", "items": _one_of([_schema(one, defs) for one in inner])}
        return {"type": "array", "items": _schema(inner[0], defs)}
    raise TypeError(f"{hint} has no schema")


def _defined(of: type[Any], defs: dict[str, Schema]) -> Schema:
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", of.__name__.lstrip("_")).lower()
    if name not in defs:
        defs[name] = {}  # it may hold itself
        properties, always = _properties(of, defs)
        defs[name] = {
            "type": "object", "required": always, "properties": properties,
            "additionalProperties": False,
        }  # fmt: skip
    return {"$ref": f"#/$defs/{name}"}


def _one_of(kinds: list[Schema]) -> Schema:
    several = [one for number, one in enumerate(kinds) if one not in kinds[:number]]
    if len(several) == 1:
        return several[0]
    if all(one.keys() == {"type"} for one in several):
        return {"type": [one["type"] for one in several]}
    return {"anyOf": several}


def _described(schema: Schema, about: str) -> Schema:
    return {**schema, "description": about} if about else schema


def _without_none(hint: Any) -> Any:
    inner = [one for one in get_args(hint) if one is not NoneType]
    several = get_origin(hint) in (Union, UnionType)
    return Union[tuple(inner)] if several else hint  # noqa: UP007


def _docs(of: type[Any]) -> dict[str, str]:
    """Return the sentence of each field in the `Attributes` of a class and its bases."""
    found: dict[str, str] = {}
    for one in reversed(of.__mro__):
        part = cleandoc(one.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
        for names, text in re.findall(r"^    ([\w, ]+): (.+(?:\n {5,}.+)*)", part, re.MULTILINE):
            said = re.sub(r"\s*\n\s*", " ", text).removesuffix(".")
            found |= dict.fromkeys(names.split(", "), re.sub(r"\bNone\b", "null", said))
    return found


def _hints(of: Any) -> dict[str, Any]:
    """Return the types of what has annotations; names that only a type checker imports, too."""
    names: dict[str, Any] = {}
    for one in reversed(getattr(of, "__mro__", (of,))):
        if one.__module__.startswith("ftckpt"):
            names |= _imported(one.__module__)
    return get_type_hints(of, localns=names, include_extras=True)


@cache
def _imported(module: str) -> dict[str, Any]:
    file = import_module(module).__file__
    assert file is not None
    package = module if file.endswith("__init__.py") else module.rpartition(".")[0]
    found: dict[str, Any] = {}
    for block in ast.parse(Path(file).read_text()).body:
        if not isinstance(block, ast.If) or ast.unparse(block.test) != "TYPE_CHECKING":
            continue
        for line in block.body:
            if isinstance(line, ast.ImportFrom):
                above = package.rsplit(".", line.level - 1)[0] if line.level else ""
                home = ".".join(one for one in (above, line.module) if one)
                for name in line.names:
                    there = vars(import_module(home))
                    found[name.asname or name.name] = (
                        there[name.name] if name.name in there else _imported(home)[name.name]
                    )
    return found | vars(import_module(module))


def text_of(name: str) -> str:
    """Return a schema as its file holds it."""
    return json.dumps(schema_of(name), indent=2) + "\n"


def file_of(name: str) -> str:
    """Return the name of the file of an operation's schema."""
    return f"{name.replace('_', '-')}.schema.json"


if __name__ == "__main__":
    for made in MADE:
        (Path(sys.argv[1]) / file_of(made)).write_text(text_of(made))
