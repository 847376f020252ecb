"""Checkpoints that are known by name and not read: one table of what gives each away.

Saying "this is a DeepSpeed folder, not read by this version" is worth more than "nothing found",
and an unreadable checkpoint can still be hostile: `hostile` parses its pickles as inert data.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from ftckpt.checkpoint import Checkpoint, CommitState
from ftckpt.discovery.recognise import Listing, Recognition, UnopenedPart
from ftckpt.discovery.step_names import SUFFIXES, stem_of, worded_step
from ftckpt.errors import FtckptError, UnsafeError, UnsupportedError
from ftckpt.findings import Finding, from_error
from ftckpt.storage.source import Source
from ftckpt.storage.store import EntryKind, Store


class Sign(NamedTuple):
    """One way to tell a layout; every given part must hold.

    Attributes:
        files: pattern that one file of the listing matches in full.
        also: pattern that another file of the listing matches in full.
        directories: pattern that one directory matches in full.
        inside: (directory, pattern of a file or directory in it).
        offset: where `magic` stands in the first file that `files` matches.
        magic: pattern that its bytes match from there on.
        single: whether the place must be that one file.
        alone: whether the file is a whole by itself, so that it says what its folder is only if
            nothing else in there may be a checkpoint: an export lies beside a run's saves.
    """

    files: str = ""
    also: str = ""
    directories: str = ""
    inside: tuple[str, str] = ("", "")
    offset: int = 0
    magic: bytes = b""
    single: bool = False
    alone: bool = False


HEAD = 4096
_ANY = r".+"


class Recognised(NamedTuple):
    """A format that is named and refused (it fits `ftckpt.discovery.recognise.Format`).

    Attributes:
        name: as in an answer's `format`.
        title: what a person calls it.
        advice: what to do instead.
        signs: any one of them is enough.
    """

    name: str
    title: str
    advice: str
    signs: tuple[Sign, ...]

    def recognise(self, listing: Listing) -> Recognition | None:
        """Say whether a sign of this format stands in `listing`."""
        for sign in self.signs:
            shown = _shown(sign, listing)
            if shown:
                reason = f"{self.title}: has {shown}"
                return Recognition(self.name, reason, CommitState.NO_MARKER, supported=False)
        return None

    def open(self, source: Source) -> Checkpoint:
        """Refuse it by name.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            f"{source.url} is a checkpoint of {self.title}, which this version does not read",
            hint=self.advice,
        )


def _shown(sign: Sign, listing: Listing) -> str:
    """Return the name that shows `sign`, or ""."""
    if sign.single != bool(listing.single):
        return ""
    name = ""
    if sign.files:
        name = _first(sign.files, listing.files)
        if not name:
            return ""
    if sign.also and not _first(sign.also, listing.files):
        return ""
    if sign.directories:
        directory = _first(sign.directories, listing.directories)
        if not directory:
            return ""
        name = name or directory + "/"
    if sign.inside[0]:
        if sign.inside[0] not in listing.directories:
            return ""
        below = listing.inside(sign.inside[0])
        inner = _first(sign.inside[1], [*below.files, *below.directories])
        if not inner:
            return ""
        name = name or f"{sign.inside[0]}/{inner}"
    if sign.magic:
        if listing.files[name].kind is EntryKind.SPECIAL:
            return ""
        head = listing.head(name, HEAD)
        if not re.compile(sign.magic, re.DOTALL).match(head, sign.offset):
            return ""
    if sign.alone and _may_hold_saves(listing, name):
        return ""
    return name


def _may_hold_saves(listing: Listing, name: str) -> bool:
    """Whether a folder has, beside the file `name`, what a root would take for a checkpoint.

    Exports of one model (`policy.onnx` and `policy.pt`) have one stem and are no other save. The
    folder of a step is a save and no root.
    """
    if worded_step(listing.called) is not None:
        return False
    own = name.rpartition(".")[0]
    return any(worded_step(folder) is not None for folder in listing.directories) or any(
        other.endswith(SUFFIXES) or worded_step(_stem(other)) is not None
        for other in listing.files
        if other != name and _stem(other) != own
    )


def _stem(name: str) -> str:
    stem = stem_of(name)
    return stem if stem != name else name.rpartition(".")[0] or name


def _first(pattern: str, names: object) -> str:
    fits = re.compile(pattern)
    assert hasattr(names, "__iter__")
    return min((name for name in names if fits.fullmatch(name)), default="")


_EXPORT = "export its weights to safetensors or torch.save with its own framework"

RECOGNISED: tuple[Recognised, ...] = (
    Recognised(
        "megatron-zarr",
        "Megatron's torch_dist with the zarr backend",
        "Megatron itself removed this backend: convert it with a Megatron-LM release that has it",
        (Sign(files=r"metadata\.json", magic=rb'.*"sharded_backend"\s*:\s*"zarr"'),),
    ),
    Recognised(
        "verl-megatron",
        "verl with the Megatron backend",
        "its list names stores, and none of their folders is here",
        (Sign(files=r"ckpt_contents\.json"),),
    ),
    Recognised(
        "bytecheckpoint",
        "ByteCheckpoint",
        _EXPORT,
        (
            Sign(
                directories=r"extra_state",
                inside=("model", r"\.metadata"),
            ),
        ),
    ),
    Recognised(
        "paddle",
        "Paddle",
        _EXPORT,
        (
            Sign(files=r"\d+_\d+\.distcp", also=r"\d+\.metadata"),
            Sign(files=rf"{_ANY}\.pd(params|opt|model|iparams)"),
            Sign(files=rf"{_ANY}\.pd(params|opt|model|iparams)", single=True),
        ),
    ),
    Recognised(
        "torchscript",
        "TorchScript: a program, not only its weights",
        "save its state_dict with torch.save or safetensors",
        # Its first record holds data or code, where torch.save begins with data.pkl.
        (Sign(files=_ANY, magic=rb"PK\x03\x04.{26}[^/]*/(data/|code/|constants)", single=True),),
    ),
    Recognised(
        "nemo",
        "NeMo 1 (a .nemo archive)",
        "unpack it with tar and name the checkpoint inside",
        (Sign(files=rf"{_ANY}\.nemo", single=True), Sign(files=rf"{_ANY}\.nemo", alone=True)),
    ),
    Recognised(
        "torch-tar",
        "torch before 0.1.10 (a tar archive)",
        "load and save it again with a trusted old torch: its tar reader can run code",
        (
            Sign(files=_ANY, magic=rb"(\./)?(sys_info|pickle|tensors|storages)\0.*", single=True),
            Sign(files=rf"{_ANY}\.(pt|pth|tar|bin)", offset=257, magic=rb"ustar", single=True),
        ),
    ),
    Recognised(
        "gguf",
        "GGUF (llama.cpp)",
        "its tensors may be quantised: go back to the checkpoint that it was made from",
        (
            Sign(files=_ANY, magic=rb"GGUF", single=True),
            Sign(files=rf"{_ANY}\.gguf", magic=rb"GGUF", alone=True),
        ),
    ),
    Recognised(
        "tensorflow",
        "TensorFlow",
        _EXPORT,
        (
            Sign(files=rf"{_ANY}\.data-\d{{5}}-of-\d{{5}}", also=rf"{_ANY}\.index"),
            Sign(files=r"saved_model\.pb(txt)?"),
        ),
    ),
    Recognised(
        "hdf5",
        "Keras or HDF5",
        _EXPORT,
        (
            Sign(files=_ANY, magic=rb"\x89HDF\r\n\x1a\n", single=True),
            Sign(files=rf"{_ANY}\.(h5|hdf5)", magic=rb"\x89HDF\r\n\x1a\n", alone=True),
            Sign(files=rf"{_ANY}\.keras", magic=rb"PK\x03\x04", single=True),
        ),
    ),
    Recognised(
        "flax",
        "Flax (msgpack)",
        _EXPORT,
        (Sign(files=rf"{_ANY}\.msgpack", alone=True), Sign(files=rf"{_ANY}\.msgpack", single=True)),
    ),
    Recognised(
        "onnx",
        "ONNX: a graph, not a training state",
        "go back to the checkpoint that it was exported from",
        (Sign(files=rf"{_ANY}\.onnx", alone=True), Sign(files=rf"{_ANY}\.onnx", single=True)),
    ),
)

# What torch.save and pickle files begin with: a zip, torch's legacy magic number, or any pickle
# protocol since 2. Older protocols are text and have no mark, so there the suffix decides.
_STREAM = (b"PK\x03\x04", b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19")
_PICKLE = rb"\x80[\x02-\x05]"
_PICKLED = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".metadata", ".distcp")
# Many archives, one behind the other: as one archive they would be ambiguous.
_JOINED = ".distcp"
# A pickle acts while it is read, so the first part of a giant one shows what it calls.
_BARE = 256 << 20


def hostile(source: Source) -> Iterator[Finding]:
    """Yield what is unsafe in the pickles of an unsupported checkpoint; nothing is executed.

    Looks at every file that begins as a torch.save archive, a legacy torch.save stream or a pickle.
    Damage is not reported: an unknown layout may hold what only looks like a pickle.
    """
    for name in sorted(source.entries):
        entry = source.entries[name]
        if entry.kind is EntryKind.SPECIAL:
            yield from_error(
                UnsafeError(f"{name} is not a regular file", kind="special-file", file=name)
            )
        elif entry.size >= 2:
            try:
                _look(source, name, entry.size)
            except UnsafeError as error:
                if error.kind == "unsafe-zip" and name.endswith(_JOINED):
                    continue
                error.file = error.file or name
                yield from_error(error)
            except FtckptError:
                continue


def _look(source: Source, name: str, size: int) -> None:
    from ftckpt.formats.pickles.sniff import refuse_hostile
    from ftckpt.formats.pickles.unpickle import BUILTINS, load
    from ftckpt.formats.torch_files.plain_pickle import begins_plain, parse_plain
    from ftckpt.formats.torch_files.stream import other_kind, parse_stream
    from ftckpt.workers.budget import budget

    with source.open(name) as reader:
        head = reader.read(0, min(size, 16))
        if head.startswith(_STREAM):
            parse_stream(reader.read, size, file=name)
        elif other_kind(head):  # it may be a pickle as well, and what is noise in one is its own
            refuse_hostile(reader.read, size, file=name)
        elif re.match(_PICKLE, head) or name.endswith(_PICKLED):
            if begins_plain(head):
                parse_plain(reader.read, size, file=name)
                return
            data = reader.read(0, min(size, _BARE, budget() // 8))
            load(data, file=name, table=BUILTINS, exact=len(data) == size)


def hostile_in(store: Store, part: UnopenedPart) -> tuple[Finding, ...]:
    """Return what is unsafe in the pickles of a checkpoint that no format can open."""
    if part.entry.kind is EntryKind.FILE:
        return tuple(hostile(Source.file(store, part.entry)))
    return tuple(hostile(Source.directory(store, part.entry.path)))
