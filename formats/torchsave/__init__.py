"""Files of `torch.save`: one file, or a Hugging Face folder of `pytorch_model-*.bin`.

One file may be a bare state_dict, a training state of any trainer (Lightning's `.ckpt` among them),
a pickled module or a single tensor; its content says which (`training_tree`). Suffixes say nothing:
`.pt`, `.pth`, `.bin` and `.ckpt` are all in use for the same bytes. Such a file may have been
compressed as a whole (`ckpt_100.pt.zst`; `torchsave_compressed`), and `pickle.dump` writes the same
state without torch.save (`latest.pkl`; `plain_pickle`).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ftckpt.checkpoint import CommitState
from ftckpt.discovery.recognise import COMPRESSED, Listing, Recognition
from ftckpt.formats.huggingface.index import shard_name
from ftckpt.storage.source import Source

from .names import INDEX, SHARD, STEMS

if TYPE_CHECKING:
    from ftckpt.checkpoint import Checkpoint, Described

LEGACY_MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19"
_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin")
# A whole file compressed afterwards; `.bin.gz` may be anything, and is looked into.
_COMPRESSED = tuple(f"{one}{packed}" for one in _SUFFIXES for packed in COMPRESSED)
_LOOK = 256 << 10  # of a compressed file: its first block, as a rule
# The names of a checkpoint that a script pickles itself; `vocab.pkl` is none.
_PICKLED = (
    r"(?:(?:[A-Za-z0-9]+[-_])*(?:latest|last|emergency|checkpoint|ckpt|model|state|best|final|step"
    r"|iter|epoch|rank|shard)[0-9]*(?:[-_=][0-9]+)*|[0-9]+)\.(?:pkl|pickle)"
)
_PROTOCOL = rb"\x80[\x02-\x05]"
_WHOLE = frozenset(f"{stem}.bin" for stem in STEMS)


class TorchSave:
    """The format `torchsave` (see the module's docstring)."""

    name = "torchsave"

    def __init__(self, described: Described | None = None) -> None:
        """Open folders that `described` holds to their `config.json`."""
        self._described = described

    def recognise(self, listing: Listing) -> Recognition | None:
        """Know a file by its first bytes, a folder by Hugging Face's names."""
        if listing.single:
            reason = _recognised(listing)
            return Recognition(self.name, reason, CommitState.NO_MARKER) if reason else None
        names = listing.files
        index = min((n for n in names if INDEX.fullmatch(n)), default="")
        if index:
            return Recognition(self.name, f"has {index}", CommitState.COMMITTED)
        whole = min(_WHOLE & names.keys(), default="")
        if whole:
            return Recognition(self.name, f"has {whole}", CommitState.NO_MARKER)
        shard = min((n for n in names if SHARD.fullmatch(n)), default="")
        if shard:
            only = all((s := shard_name(n)) and s.total == 1 for n in names if SHARD.fullmatch(n))
            state = CommitState.NO_MARKER if only else CommitState.UNCOMMITTED
            return Recognition(self.name, f"has {shard}", state)
        return None

    def open(self, source: Source) -> Checkpoint:
        """Parse the pickles; no storage is read.

        Raises:
            NotFoundError: the folder holds no weights.
            IncompleteError: shards without their index.
            CorruptError: the only file is damaged, or the index is.
            UnsafeError: a zip, a pickle or an index is hostile.
            UnsupportedError: TorchScript, big-endian, one rank's shard of a distributed tensor.
            NoResourceError: a compressed file needs more room than there is.
        """
        if source.single and next(iter(source.entries)).endswith(_COMPRESSED):
            from .compressed import open_compressed

            return open_compressed(source)
        from .reader import open_torchsave

        checkpoint = open_torchsave(source)
        checkpoint.described = self._described
        return checkpoint


def _recognised(listing: Listing) -> str:
    """Return why one file is a torch.save stream, or ""."""
    name = listing.single
    # DCP's data files are such zips one after another, and nothing without their metadata.
    if listing.files[name].kind != "file" or name.endswith(".distcp"):
        return ""
    if packed := next((s for s in _COMPRESSED if name.endswith(s)), ""):
        if packed.startswith(".bin"):
            from ftckpt.formats.torch_files.compression import beginning

            inside = beginning(listing.head(name, _LOOK), 4096)
            if not inside.startswith(LEGACY_MAGIC) and b"/data.pkl" not in inside:
                return ""
        return f"has a suffix of a compressed torch.save file ({packed})"
    head = listing.head(name, 4096)
    if head.startswith(LEGACY_MAGIC):
        return "begins with torch's legacy magic number"
    pickled = re.fullmatch(_PICKLED, name) is not None
    torch_suffix = name.endswith(_SUFFIXES)
    # Before the names of pickles: torch.save writes its zip to `latest.pkl`, too.
    if head.startswith(b"PK\3\4"):
        if re.search(rb"/(constants\.pkl|code/__torch__)", head):
            return ""
        if b"/data.pkl" in head[:4096]:
            return "is a zip with data.pkl"
        return "is a zip with a suffix of torch.save" if torch_suffix else ""
    if pickled:
        # A file of nothing or of zeros keeps its name: it was lost in a crash.
        known = re.match(_PROTOCOL, head) or not head.strip(b"\0")
        return "is a pickle with a name of a checkpoint" if known else ""
    # A damaged file keeps its name: it is corrupt, not unknown.
    if torch_suffix and not name.endswith(".bin") and head[257:262] != b"ustar":
        return f"has a suffix of torch.save ({name[name.rindex('.') :]})"
    return ""
