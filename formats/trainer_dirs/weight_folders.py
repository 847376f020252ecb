"""Weights in folders of a trainer's directory, and which model each is of.

    checkpoint-500/unet/, unet_ema/        diffusers' training scripts, with accelerate's state
    checkpoint-500/transformer/, controlnet/
    checkpoint-10/reference/               PEFT: an adapter of another name than `default`
    1_Pooling/, 2_Dense/                   named by modules.json (`huggingface.declared_folders`)

Sources: diffusers' examples (`save_model_hook`: each model's own class, in one folder each);
peft/peft_model.py (`save_pretrained`: `default` at the top, others in folders of their names).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from ftckpt.checkpoint import Checkpoint
from ftckpt.discovery.recognise import Format, Listing, Recognition
from ftckpt.discovery.step_names import is_put_aside, step_in_name
from ftckpt.errors import IncompleteError
from ftckpt.findings import Finding, from_error
from ftckpt.formats.huggingface.declared_folders import MODULES, DeclaredFolder, folders_of
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
