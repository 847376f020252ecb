"""The parser of a verb is built once for all tests: it took half of a small run."""

from __future__ import annotations

from importlib import import_module

from ftckpt.commands.cli import verbs

_load = verbs.load
_loaded: dict[str, tuple[object, verbs.Verb]] = {}


def load_once() -> None:
    """Let `verbs.load` keep what it builds; call it before others import it by its name."""
    verbs.load = _kept


def _kept(verb: str) -> verbs.Verb:
    module = import_module(f"ftckpt.commands.{verb.replace(' ', '.')}")
    if verb not in _loaded or _loaded[verb][0] is not module.command:  # a test may put its own
        _loaded[verb] = (module.command, _load(verb))
    return _loaded[verb][1]
