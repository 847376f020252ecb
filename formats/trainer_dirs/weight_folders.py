"""Weights in folders of a trainer's directory, and which model each is of.

    checkpoint-500/unet/, unet_ema/        diffusers' training scripts, with accelerate's state
    checkpoint-500/transformer/, controlnet/
    checkpoint-10/reference/               PEFT: an adapter of another name than `default`
    1_Pooling/, 2_Dense/                   named by modules.json (`huggingface.declared_folders`)

Sources: diffusers' examples (`save_model_hook`: each model's own class, in one folder each);
peft/peft_model.py (`save_pretrained`: `default` at the top, others in folders of their names).

Weights that one save wrote twice: for the resumption, and in Hugging Face's layout beside that.

The first are in DeepSpeed's tag, FSDP's gathered `pytorch_model_fsdp.bin`, or RLinf's stores.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from ftckpt.checkpoint import Box, Checkpoint, Kind, Piece, TensorInfo
from ftckpt.discovery.recognise import Format, Listing, Recognition
from ftckpt.discovery.step_names import is_put_aside, step_in_name
from ftckpt.errors import IncompleteError
from ftckpt.findings import Finding, counted, finding, from_error, listed
from ftckpt.formats.huggingface.declared_folders import MODULES, DeclaredFolder, folders_of
from ftckpt.formats.torch_files.values import is_dense, reach
from ftckpt.storage.source import Source

from .names import FOLDER, TAG, TRAINED

# The formats that hold weights under names of Hugging Face's.
_FORMATS = frozenset({"safetensors", "torchsave"})
# What is trained, where several folders hold weights and none lies at the top.
_FIRST = ("transformer", "unet", "prior", "controlnet", "model", "default", *TRAINED)
# A trainer's output directory holds such models beside its last state.
_APART = re.compile(
    r"(?:best|final|last|latest|merged|export(?:ed)?|release|hf|huggingface)(?:[-_.].*)?"
)
_AVERAGE = re.compile(r"(?P<of>.+)[_-]ema|ema(?:[_-](?P<model>.+))?")


def weight_folders(
    directories: Iterable[str], inside: Callable[[str], Listing], formats: Sequence[Format]
) -> dict[str, Recognition]:
    """Return the folders that hold weights, by name.

    Folders that are steps themselves, that somebody put aside, or whose names say what a whole
    model is for hold other checkpoints.

    Args:
        directories: at the top of the directory.
        inside: lists one of them.
        formats: asked in their order.
    """
    found = {}
    for name in sorted(directories):
        if name.startswith((".", "_")) or FOLDER.fullmatch(name) or re.fullmatch(TAG, name):
            continue
        if step_in_name(name) is not None or is_put_aside(name) or _APART.fullmatch(name):
            continue
        if (seen := weights_in(inside(name), formats)) is not None:
            found[name] = seen
    return found


def weights_in(listing: Listing, formats: Sequence[Format]) -> Recognition | None:
    """Return how weights lie in a folder; None if there are none under a name that is known."""
    asked = (one for one in formats if one.name in _FORMATS)
    return next((seen for one in asked if (seen := one.recognise(listing)) is not None), None)


def models_of(
    folders: Collection[str], declared: Sequence[DeclaredFolder], *, top: bool
) -> dict[str, str]:
    """Return folder -> what its model is called; "" for the trained one, `ema` for its average.

    Args:
        folders: with weights.
        declared: what a file at the top names; sentence-transformers' first module is the model.
        top: whether weights lie at the top too: then these are the trained model's.
    """
    averages = {name: match for name in folders if (match := _AVERAGE.fullmatch(name))}
    rest = sorted(set(folders) - set(averages))
    modules = [one.path for one in declared if one.by == MODULES]
    known = (*modules, *_FIRST, *(rest if len(rest) == 1 else ()))
    main = "" if top else next((n for n in known if n in rest), "")
    found = {}
    for name in folders:
        match = averages.get(name)
        of = "" if match is None else match["of"] or match["model"] or main
        own = match is not None and main != name and of == main
        found[name] = "" if name == main else "ema" if own else name.replace("/", ".")
    return found


def lost_model(folders: Collection[str], *, top: bool) -> Iterator[Finding]:
    """Yield a trained model that is not there, of which an average lies in a folder.

    Args:
        folders: with weights.
        top: whether weights lie at the top too.
    """
    averages = [match for name in sorted(folders) if (match := _AVERAGE.fullmatch(name))]
    if top or not averages or len(averages) < len(folders):
        return
    first = averages[0]
    model = first["of"] or first["model"] or "the model"
    what = f"{model} is not there: {first[0]} holds its average, and nothing holds its weights"
    yield from_error(IncompleteError(what, kind="missing-file", file=first["of"]))


class FoldersReader:
    """Reads folders of safetensors, also those that a file at the top names (fits `Format`)."""

    def __init__(self, own: Format, bundle: Format) -> None:
        """Read one folder by `own`, and several by `bundle`."""
        self._own, self._bundle = own, bundle

    @property
    def name(self) -> str:
        """The name of the format that reads one folder."""
        return self._own.name

    def recognise(self, listing: Listing) -> Recognition | None:
        """Say what one folder is."""
        return self._own.recognise(listing)

    def open(self, source: Source) -> Checkpoint:
        """Open all that belongs to it (see `Format.open`)."""
        top = [name for name in source.entries if "/" not in name]
        several = not source.single and any(one.path for one in folders_of(top, source.head))
        return (self._bundle if several else self._own).open(source)


COMPONENT = "extra:huggingface"
# PEFT leaves the adapter's own name out of the names in its file (`get_peft_model_state_dict`).
_ADAPTER = re.compile(r"(?:\.modules_to_save)?\.default(?=\.|$)")


@dataclass
class SecondCopy:
    """What a file of weights adds to the tensors of a tag.

    Attributes:
        tensors: by key: those of the tag with one more copy, and those that only the file has.
        files: with copies of what the tag has.
        findings: tensors of other shapes.
        notes: what was not compared.
    """

    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    files: set[str] = field(default_factory=set)
    findings: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)


def second_copy(
    found: Checkpoint,
    tag: Mapping[str, TensorInfo],
    aliases: Mapping[str, str],
    component: str = "model",
) -> SecondCopy:
    """Join weights with the tag's where name, shape and type are the same.

    Stage 3 saves no weights: there the file's are the model's, and the tag's masters name them.
    What the tag does not know (trainers rename weights as they save them), and what it keeps in
    another type or in several pieces, is of the component `extra:huggingface`.

    Args:
        found: the opened file.
        tag: the tensors of the first copy's part, by key.
        aliases: of these: key -> key of the tensor that owns the bytes.
        component: of the weights that stand there twice.
    """
    made = SecondCopy()
    weights = {info.name: info for info in tag.values() if info.component == component}
    masters = {info.name: info for info in tag.values() if info.kind is Kind.MASTER}
    known = {_ADAPTER.sub("", name): name for name in sorted(masters | weights)}
    apart: list[str] = []
    for key, info in found.tensors.items():
        name = info.name if info.name in masters or info.name in weights else known.get(info.name)
        first = weights.get(name or "")
        master = masters.get(name or "")
        alike = first or master
        if alike is not None and alike.shape != info.shape:
            file = info.pieces[0].extent.file
            what = (
                f"{key} has the shape {list(info.shape)} in {file}, and {list(alike.shape)} in"
                " the files that the trainer resumes from"
            )
            made.findings.append(finding("shape-mismatch", what, file=file, tensor=key))
        elif first is not None:
            first = tag[aliases.get(first.key, first.key)]
            copies = _cut_alike(first, info)
            if copies:
                made.tensors[first.key] = first._replace(pieces=[*first.pieces, *copies])
                made.files.update(piece.extent.file for piece in copies)
                continue
        elif master is not None:
            joined = info._replace(name=master.name, kind=Kind.PARAM, stored_name=info.name)
            made.tensors[joined.key] = joined
            continue
        apart.append(key)
        other = info._replace(component=COMPONENT)
        made.tensors[other.key] = other
    names = {known.get(info.name, info.name) for info in found.tensors.values()}
    tied = {tag[key].name for pair in aliases.items() for key in pair if key in tag}
    lost = [name for name in masters if name not in names and name not in tied]
    if lost and names & masters.keys() and not apart:
        file = next(iter(found.tensors.values())).pieces[0].extent.file
        what = f"{file} lacks weights that are trained: {listed(lost, 3)}"
        made.findings.append(finding("missing-tensor", what, file=file, tensor=lost[0]))
    if apart:
        what = f"{counted(len(apart), 'tensor')} of the weights' second copy ({listed(apart, 3)})"
        what += " cannot be compared with the first: kept apart"
        made.notes.append(finding("note", what, tensor=apart[0]))
    return made


def _cut_alike(first: TensorInfo, second: TensorInfo) -> list[Piece]:
    """Return the second copy as replicas of the first one's pieces; none if it cannot be cut so.

    The second must hold the whole tensor in one dense piece, of the same type. Shards of the first
    are compared with their parts of it.
    """
    (*others, piece) = second.pieces or (None,)
    whole = Box.whole(second.shape)
    if others or piece is None or first.dtype != second.dtype or first.dtype.itemsize < 1:
        return []
    if piece.box != whole or piece.flat is not None or not first.pieces:
        return []
    if any(p.flat is not None for p in first.pieces):
        return []
    boxes = list(dict.fromkeys(p.box for p in first.pieces if not p.replica))
    if boxes == [whole]:
        return [piece._replace(replica=1)]
    if piece.strides is not None:
        return []
    strides = [1] * len(second.shape)
    for axis in range(len(strides) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * second.shape[axis]
    size = first.dtype.itemsize
    found = []
    for box in boxes:
        at = sum(n * stride for n, stride in zip(box.offsets, strides, strict=True))
        dense = is_dense(box.sizes, tuple(strides))
        length = prod(box.sizes) if dense else reach(box.sizes, tuple(strides))
        extent = piece.extent._replace(offset=piece.extent.offset + at * size, length=length * size)
        found.append(Piece(box, extent, None, None if dense else tuple(strides), 1))
    return found


def copy_of_model(found: Checkpoint, name: str, tensors: Mapping[str, TensorInfo]) -> SecondCopy:
    """Join weights that one save wrote twice of a further model (see `second_copy`).

    Args:
        found: the opened file.
        name: what the model is called.
        tensors: all tensors of the step so far, by key.
    """
    component = f"extra:{name}"
    own = [
        info._replace(component="model")
        for info in tensors.values()
        if info.component == component and info.kind in (Kind.PARAM, Kind.BUFFER)
    ]
    made = second_copy(found, {info.key: info for info in own}, {})
    named = [
        info._replace(component=component if info.component == "model" else f"{component}.again")
        for info in made.tensors.values()
    ]
    made.tensors = {info.key: info for info in named}
    return made
