"""DeepSpeed's tag inside a trainer's directory: which folder it is, and what names it.

Sources: `deepspeed/runtime/engine.py` of DeepSpeed 0.19 (`save_checkpoint` writes `latest` after
the tag; `load_checkpoint` without a tag begins there);
`transformers/integrations/deepspeed.py` (`deepspeed_load_checkpoint`, which names no tag);
`accelerate/accelerator.py` (`save_state`: the tag is `pytorch_model`, and loading names it).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ftckpt.checkpoint import Checkpoint
from ftckpt.errors import CorruptError, UnsupportedError
from ftckpt.findings import Finding, finding, listed
from ftckpt.formats.deepspeed.names import deepspeed_files
from ftckpt.storage.source import Source

from .names import POINTER, TAG

_MOST = 4096


def tags_in(source: Source) -> list[str]:
    """Return the folders that hold files of DeepSpeed, under names that a trainer gives them."""
    inside: dict[str, list[str]] = {}
    for name in source.entries:
        folder, slash, rest = name.partition("/")
        if slash and re.fullmatch(TAG, folder):
            inside.setdefault(folder, []).append(rest)
    return sorted(folder for folder, names in inside.items() if deepspeed_files(names))


def pointed_at(source: Source) -> str | None:
    """Return the name in `latest`; None without such a file.

    Raises:
        CorruptError: it holds no name.
    """
    if POINTER not in source.entries:
        return None
    raw = source.read(POINTER, 0, min(_MOST, source.size(POINTER)))
    name = raw.decode("utf-8", "replace").strip()
    if not name or not name.isprintable():
        raise CorruptError(f"{POINTER} holds no name of a tag", kind="bad-index", file=POINTER)
    return name


def choose_tag(source: Source, tags: Sequence[str], *, trainer: bool) -> tuple[str, list[Finding]]:
    """Return the tag that the trainer would load, and what is wrong with its name.

    Raises:
        UnsupportedError: there are several, and nothing says which.
        CorruptError: see `pointed_at`.
    """
    named = pointed_at(source)
    found: list[Finding] = []
    if named is not None and named not in tags and (trainer or re.fullmatch(TAG, named)):
        what = f"{POINTER} names {named!r}, which is not there"
        found.append(finding("pointer-dangling", what, file=POINTER))
    if named is None and trainer:
        what = f"{POINTER} is missing: DeepSpeed takes the name of the tag from it"
        found.append(finding("missing-file", what, file=POINTER))
    if named in tags:
        return str(named), found
    if len(tags) > 1:
        raise UnsupportedError(
            f"{source.url} holds {listed(tags)}, and {POINTER} names none of them",
            hint="each is a checkpoint of its own: name one",
            file=tags[0],
        )
    return tags[0], found


def step_of_tag(tag: str, found: Checkpoint) -> Iterator[Finding]:
    """Yield a tag whose name has another step than its content: the Trainer never renames one."""
    match = re.fullmatch(TAG, tag)
    if match is None or match["step"] is None or found.step is None:
        return
    if int(match["step"]) != found.step:
        what = f"{tag} is of step {found.step}: the files in it are of another save than their tag"
        yield finding("mixed-steps", what, file=f"{tag}/{next(iter(found.members()))}")
