"""Folders that a file at the top names as parts of one model.

    modules.json       sentence-transformers: modules in their order, each with its folder and class
    model_index.json   diffusers: the parts of a pipeline, each with its library and class

Weights may lie in any of them (`2_Dense`, `text_encoder`); others hold configuration alone
(`1_Pooling`, `scheduler`). Which of them must have weights is told by the class, and in a pipeline
by `config.json`: schedulers, tokenizers and processors have configurations of other names.

Sources: sentence_transformers/SentenceTransformer.py (`_load_sbert_model`) and models/;
diffusers/pipelines/pipeline_utils.py (`from_pretrained`) and configuration_utils.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ftckpt.errors import UnsafeError
from ftckpt.storage.source import safe_name

MODULES, PIPELINE = "modules.json", "model_index.json"
_FILES = (MODULES, PIPELINE)
_MOST_BYTES = 64 << 10
_TRAINED_MODULES = frozenset(
    {
        "Transformer", "MLMTransformer", "CLIPModel", "Dense", "CNN", "LSTM", "WordEmbeddings",
        "LayerNorm", "WeightedLayerPooling", "StaticEmbedding", "SparseStaticEmbedding",
        "SparseAutoEncoder",
    }
)  # fmt: skip
_WITHOUT_WEIGHTS = re.compile(
    r"(?:Tokenizer(?:Fast)?|Scheduler|Processor(?:Fast)?|Extractor|Guider|Watermarker)$"
)
_WITH_WEIGHTS = re.compile(
    r"Model$|^UNet|^Autoencoder|^ControlNet|^VQ|Transformer\d?D?|SafetyChecker$|WithProjection$"
)


class DeclaredFolder(NamedTuple):
    """One folder that belongs to a model.

    Attributes:
        path: relative to the model's directory; "" for the directory itself.
        by: the file that names it.
        trained: whether it must hold weights; None: it does if it has a `config.json`.
    """

    path: str
    by: str
    trained: bool | None

    @property
    def needs_config(self) -> bool:
        """Whether it must hold a `config.json`: each model of a pipeline does."""
        return bool(self.path) and self.by == PIPELINE and self.trained is True

    def needs_weights(self, names: Collection[str]) -> bool:
        """Say whether its weights must be among the files of the model's directory."""
        return self.trained if self.trained is not None else f"{self.path}/config.json" in names


@runtime_checkable
class HoldsFolders(Protocol):
    """A checkpoint of which parts lie in folders that one of its files names."""

    @property
    def declared(self) -> Sequence[DeclaredFolder]:
        """The folders; empty for a checkpoint without such a file."""

    @property
    def stems(self) -> Mapping[str, str]:
        """The component of the tensors in a folder -> that folder and the stem of its files."""


def declared_folders(
    files: Collection[str], read: Callable[[str, int], bytes]
) -> list[DeclaredFolder]:
    """Return the folders that a model's own file names; none if it has no such file.

    Args:
        files: the names of the files at the top.
        read: returns up to the first bytes of one.

    Raises:
        UnsafeError: a folder lies outside, or the file is longer than any that names folders: what
            is not read may name more.
    """
    for name in _FILES:
        if name not in files:
            continue
        head = read(name, _MOST_BYTES + 1)
        if len(head) > _MOST_BYTES:
            raise UnsafeError(
                f"{name} is longer than the {_MOST_BYTES} bytes that are read of it",
                kind="unsafe-index",
                file=name,
            )
        try:
            said = json.loads(head)
        except (ValueError, RecursionError):
            continue
        found = _of_modules(said) if name == MODULES else _of_pipeline(said)
        if found:
            return found
    return []


def folders_of(files: Collection[str], read: Callable[[str, int], bytes]) -> list[DeclaredFolder]:
    """Return the same, for recognition: a folder that lies outside is left to the reader."""
    try:
        return declared_folders(files, read)
    except UnsafeError as error:
        return [DeclaredFolder(".", error.file or MODULES, None)]


def _of_modules(said: Any) -> list[DeclaredFolder]:
    found = []
    for one in said if isinstance(said, list) else ():
        path, kind = (one.get("path"), one.get("type")) if isinstance(one, dict) else (None, None)
        if not isinstance(path, str) or not isinstance(kind, str):
            return []
        own = kind.startswith("sentence_transformers.")
        trained = own and kind.rpartition(".")[2] in _TRAINED_MODULES
        found.append(DeclaredFolder(path and safe_name(path, named_by=MODULES), MODULES, trained))
    return found


def _of_pipeline(said: Any) -> list[DeclaredFolder]:
    if not isinstance(said, dict) or not isinstance(said.get("_class_name"), str):
        return []
    found = []
    for name, one in said.items():
        if name.startswith("_") or not isinstance(one, list) or len(one) != 2:
            continue
        library, kind = one
        if not isinstance(library, str) or not isinstance(kind, str):
            continue  # a part that this pipeline was saved without
        trained: bool | None = None
        if _WITHOUT_WEIGHTS.search(kind):
            trained = False
        elif _WITH_WEIGHTS.search(kind):
            trained = True
        found.append(DeclaredFolder(safe_name(name, named_by=PIPELINE), PIPELINE, trained))
    return found
