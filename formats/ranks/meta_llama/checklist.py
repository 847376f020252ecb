"""What lies beside `consolidated.NN.pth` in Meta's releases.

`params.json` describes the model, `checklist.chk` has the MD5 of each file as md5sum prints it.
Source: download.sh of Meta.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ftckpt.errors import CorruptError, UnsafeError
from ftckpt.findings import Finding, finding
from ftckpt.formats.huggingface.index import is_beside
from ftckpt.formats.ranks.names import rank_file
from ftckpt.formats.ranks.parse_files import RecordedConfig
from ftckpt.own_files import is_own
from ftckpt.storage.source import Source, safe_name
from ftckpt.strict_json import shown

CHECKLIST = "checklist.chk"
_LARGEST = 1 << 20  # bytes of a checklist
_LINE = re.compile(r"([0-9a-fA-F]{32}) [ *](.+)")


def is_of_release(name: str) -> bool:
    """Say whether a file lies beside Meta's weights: parameters, a tokenizer, lists of MD5."""
    return "/" not in name and not is_own(name) and (name.endswith(".chk") or is_beside(name))


def read_checklist(source: Source) -> dict[str, str]:
    """Return the MD5 of each file that `checklist.chk` lists; empty where there is none.

    Raises:
        CorruptError: it is not what md5sum prints (`bad-index`).
        UnsafeError: a name in it leaves the checkpoint.
    """
    if source.single or CHECKLIST not in source.entries:
        return {}
    if source.size(CHECKLIST) > _LARGEST:
        raise CorruptError(
            f"{CHECKLIST} has more than {_LARGEST} bytes", kind="bad-index", file=CHECKLIST
        )
    found: dict[str, str] = {}
    for line in source.read(CHECKLIST).decode("utf-8", "replace").splitlines():
        match = _LINE.fullmatch(line.strip())
        if line.strip() and match is None:
            raise CorruptError(
                f"{CHECKLIST} has the line {shown(line)}, which is not an MD5 and a name",
                kind="bad-index",
                file=CHECKLIST,
            )
        if match is not None:
            name = safe_name(match[2].removeprefix("./"), named_by=CHECKLIST)
            if found.setdefault(name, match[1].lower()) != match[1].lower():
                raise CorruptError(
                    f"{CHECKLIST} has two MD5 of {shown(name)}", kind="bad-index", file=CHECKLIST
                )
    return found


def listed_release(source: Source) -> RecordedConfig:
    """Return how many files of weights `checklist.chk` lists."""
    try:
        listed = [file for file in map(rank_file, read_checklist(source)) if file is not None]
    except (CorruptError, UnsafeError):  # `check_checklist` says it
        listed = []
    count = 1 + max((file.rank for file in listed if file.of_meta), default=-1)
    return RecordedConfig(CHECKLIST, {"world_size": count}) if count else RecordedConfig()


def check_checklist(source: Source) -> Iterator[Finding]:
    """Yield the files besides ranks that `checklist.chk` lists and that are not there."""
    for name in sorted(read_checklist(source).keys() - source.entries.keys()):
        if rank_file(name) is not None:  # a rank that is missing
            continue
        what = f"{name}, which {CHECKLIST} lists, is missing"
        yield finding("missing-file", what, file=name)
