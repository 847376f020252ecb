"""Record the training that this interpreter runs; `ftckpt replay run` puts it on PYTHONPATH.

Python imports a module of this name at start-up, before the user's program. It finds ftckpt beside
itself, so the training's environment need not have it, and then runs the `sitecustomize` that it
hides, if there is one.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def _find_ftckpt() -> None:
    """Make `import ftckpt` find the package of this file, without touching sys.path."""
    package = _HERE.parents[1]
    spec = spec_from_file_location(
        "ftckpt", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    if spec is not None and spec.loader is not None and "ftckpt" not in sys.modules:
        sys.modules["ftckpt"] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules["ftckpt"])


def _hand_over() -> None:
    """Run the next sitecustomize on the path."""
    others = [place for place in sys.path if place and Path(place).resolve() != _HERE]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


if os.environ.get("FTCKPT_REPLAY_LOG"):
    _find_ftckpt()
    from ftckpt import hook

    hook.install()
_hand_over()
