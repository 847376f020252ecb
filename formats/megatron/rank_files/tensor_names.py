"""Map tensor names in one rank's file to names in the whole model.

Layers are numbered within a pipeline stage and experts within an expert-parallel rank; the whole
model's names carry the numbers of the model. All else keeps its name. A name of before
megatron-core is the path of its nested dicts: `language_model.encoder.layers.0.…`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ftckpt.checkpoint import Kind
from ftckpt.errors import CorruptError, FtckptError, UnsafeError, UnsupportedError
from ftckpt.formats.pickles.walk import leaves
from ftckpt.formats.torch_files.sharded import HeldReader
from ftckpt.formats.torch_files.values import Composite, SubclassRef, TensorRef

_LAYER = re.compile(r"((?:.*?\.)?layers\.)(\d{1,9})(\..*)", re.DOTALL)
_EXPERT = re.compile(
    r"(.*\.experts\.(?:local_experts\.|linear_fc[12]\.(?:weight|bias)))(\d{1,9})(|\..*)", re.DOTALL
)
_STACKED = re.compile(r".*\.experts\.weight[12]", re.DOTALL)
_CHUNK = re.compile(r"model(\d{0,4})")
# What Transformer Engine keeps for its quantised arithmetic.
EXTRA_STATE = "_extra_state"
# Patterns take time by the square of a name's length.
_LONGEST = 2048
# Of the model's tensors, those that no optimizer updates.
_BUFFERS = (".expert_bias", ".local_tokens_per_expert", ".inv_freq", ".running_mean",
            ".running_var")  # fmt: skip
# A copy of the embedding on the last stage, by the names of megatron-core and of before.
_EMBEDDING = "embedding.word_embeddings.weight"
_HEADS = {
    "output_layer.weight": _EMBEDDING,
    "word_embeddings_for_head.weight": f"language_model.{_EMBEDDING}",
}


class LocalTensor(NamedTuple):
    """A tensor of the model as one rank holds it."""

    chunk: int  # which model chunk of the stage
    name: str  # as the file spells it
    ref: TensorRef  # where its elements are
    kind: Kind  # parameter or buffer

    @property
    def expert(self) -> bool:
        """Whether it belongs to experts, which are divided in a way of their own."""
        return is_expert(self.name)

    @property
    def stacked(self) -> bool:
        """Whether it holds all experts of its rank."""
        return is_stacked(self.name)


def is_stacked(name: str) -> bool:
    """Return whether a tensor of this name holds all experts of its rank."""
    return _STACKED.fullmatch(name) is not None


def is_expert(name: str) -> bool:
    """Return whether a tensor of this name belongs to experts (shared experts are dense)."""
    return ".experts." in name


def chunk_keys(tree: Mapping[Any, Any]) -> dict[int, str]:
    """Return the keys of a file that hold the model, by number of the chunk.

    Raises:
        UnsafeError: two keys mean one chunk, or one model stands beside chunks of one.
        CorruptError: a chunk is missing (`bad-metadata`).
    """
    found: dict[int, str] = {}
    for key, value in tree.items():
        match = _CHUNK.fullmatch(key) if isinstance(key, str) else None
        if match and isinstance(value, dict):
            number = int(match[1] or 0)
            if number in found or (found and "model" in tree):
                raise UnsafeError(
                    f"a file holds its model twice: as {next(iter(found.values()))} and {key}"
                )
            found[number] = key
    if sorted(found) != list(range(len(found))):
        what = f"a file holds {len(found)} model chunks, up to number {max(found)}"
        raise CorruptError(what, kind="bad-metadata")
    return dict(sorted(found.items()))


def local_tensors(tree: Mapping[Any, Any], rank: int) -> tuple[list[LocalTensor], dict[str, Any]]:
    """Return a file's model tensors in the order of the model, and what else stands among them.

    What else: `_extra_state` of Transformer Engine where it is not empty, by chunk key.

    Raises:
        UnsupportedError: a quantised tensor, or one of a subclass that hides its elements.
        UnsafeError: a name longer than any model has; see also `chunk_keys`.
    """
    reader = HeldReader(rank)
    found: list[LocalTensor] = []
    rest: dict[str, dict[str, Any]] = {}
    for chunk, key in chunk_keys(tree).items():
        for path, value in leaves(tree[key]):
            name = ".".join(map(str, path))
            if len(name) > _LONGEST:
                raise UnsafeError(
                    "a tensor's name is longer than any model's", kind="unsafe-pickle"
                )
            if isinstance(value, (TensorRef, SubclassRef, Composite)) and not name.endswith(
                EXTRA_STATE
            ):
                ref = _held(reader, value, name)
                found.append(LocalTensor(chunk, name, ref, _kind(name, ref)))
            elif path and value is not None and value != {}:
                rest.setdefault(key, {})[name] = value
    return found, dict(rest)


def _held(reader: HeldReader, value: Any, name: str) -> TensorRef:
    try:
        held = reader.read(value)
    except FtckptError as error:
        error.tensor = error.tensor or name
        raise
    if not isinstance(held, TensorRef):
        raise UnsupportedError(f"{name} is a sharded tensor inside a rank's own file", tensor=name)
    return held


def _kind(name: str, ref: TensorRef) -> Kind:
    trained = ref.dtype.family in ("float", "complex") and not name.endswith(_BUFFERS)
    return Kind.PARAM if trained else Kind.BUFFER


def parameters(held: Iterable[LocalTensor]) -> list[LocalTensor]:
    """Return the parameters as `Module.parameters()` gives them: one that is tied comes once."""
    seen: set[tuple[Any, ...]] = set()
    found = []
    for local in held:
        ref = local.ref
        place = (ref.key, ref.storage_offset, ref.shape, ref.strides)
        if local.kind is Kind.PARAM and (place not in seen or not ref.numel):
            seen.add(place)
            found.append(local)
    return found


def layer_counts(held: Iterable[LocalTensor]) -> dict[tuple[str, int], int]:
    """Return how many layers a file has of each stack (`decoder.layers.`) in each chunk."""
    found: dict[tuple[str, int], int] = {}
    for local in held:
        match = _LAYER.fullmatch(local.name)
        if match:
            key = match[1], local.chunk
            found[key] = max(found.get(key, 0), int(match[2]) + 1)
    return found


def expert_count(held: Iterable[LocalTensor]) -> int:
    """Return how many experts a file has, by their names; 0 where names do not show it."""
    numbers = (int(match[2]) for local in held if (match := _EXPERT.fullmatch(local.name)))
    return max(numbers, default=-1) + 1


def global_name(name: str, layers: Mapping[str, int], first_expert: int) -> str:
    """Return a tensor's name in the whole model.

    Args:
        name: as the rank's file spells it.
        layers: the number in the model of the first layer of each stack.
        first_expert: the number in the model of the rank's first expert.
    """
    match = _LAYER.fullmatch(name)
    if match:
        stack, number, rest = match.groups()
        name = f"{stack}{layers.get(stack, 0) + int(number)}{rest}"
    match = _EXPERT.fullmatch(name)
    if match:
        head, number, rest = match.groups()
        name = f"{head}{first_expert + int(number)}{rest}"
    return name


def local_name(name: str, layers: Mapping[str, int], first_expert: int) -> str:
    """Return what a rank's file calls a tensor of the whole model: the inverse of `global_name`."""
    return global_name(name, {stack: -first for stack, first in layers.items()}, -first_expert)


def layer_of(name: str) -> tuple[str, int] | None:
    """Return the stack (`decoder.layers.`) and the number of the layer that a name is of."""
    match = _LAYER.fullmatch(name)
    return (match[1], int(match[2])) if match else None


def expert_of(name: str) -> tuple[str, int] | None:
    """Return the number of the one expert that a name is of, and the name with a `%` for it."""
    match = _EXPERT.fullmatch(name)
    return (f"{match[1]}%{match[3]}", int(match[2])) if match else None


def with_expert(pattern: str, number: int) -> str:
    """Return the name of an expert's tensor: the inverse of `expert_of`."""
    return pattern.replace("%", str(number), 1)


def tied_to(name: str) -> str | None:
    """Return the embedding of which a tensor of this name is a copy where weights are tied."""
    for head, embedding in _HEADS.items():
        if name == head or name.endswith("." + head):
            return name.removesuffix(head) + embedding
    return None


def head_of(name: str) -> str:
    """Return what the last stage calls its copy of an embedding: the inverse of `tied_to`."""
    before_core = f"language_model.{_EMBEDDING}"
    if name == before_core:
        return "word_embeddings_for_head.weight"
    return name.removesuffix(_EMBEDDING) + "output_layer.weight"


def is_embedding(name: str) -> bool:
    """Return whether a tensor of this name is the word embedding."""
    return name == _EMBEDDING or name.endswith("." + _EMBEDDING)


def shared_over_stages(held: Iterable[LocalTensor], *, first: bool, tied: bool) -> Iterator[str]:
    """Yield the names of embeddings that another pipeline stage holds a copy of.

    Args:
        held: the parameters of one chunk.
        first: whether it is the first chunk of the first stage.
        tied: whether embedding and output layer are one; else only stages that predict several
            tokens share the embedding.
    """
    names = [local.name for local in held]
    embeddings = [name for name in names if is_embedding(name)]
    yield from embeddings
    if not embeddings and tied and not first:
        yield from (name for name in names if tied_to(name))
