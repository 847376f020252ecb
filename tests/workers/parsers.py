"""The parser of a verb is built once for all tests: it took half of a small run."""

from __future__ import annotations

from importlib import import_module

from ftckpt.commands.cli import verbs
from ftckpt.commands.cli.derive import Verb

_load = verbs.load
_loaded: dict[str, tuple[object, Verb]] = {}


def load_once() -> None:
    """Let `verbs.load` keep what it builds; call it before others import it by its name."""
    verbs.load = _kept


def _kept(verb: str) -> Verb:
    module = import_module(f"ftckpt.commands.{verb.replace(' ', '.')}")
    own = getattr(module, "operation", None) or module.command  # a test may put its own
    if verb not in _loaded or _loaded[verb][0] is not own:
        _loaded[verb] = (own, _load(verb))
    return _loaded[verb][1]
