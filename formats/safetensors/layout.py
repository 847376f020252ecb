"""One safetensors file, laid out as the reference serialiser lays it out.

Tensors lie by descending alignment of their types, then by name, and the header is padded with
spaces to a multiple of eight, so that every tensor is naturally aligned.
Source: `prepare` and `enum Dtype` in safetensors' `tensor.rs`.

Prepare tensors for safetensors files: each once, under its stored name.

Lay out weights as one safetensors file, for `load_file` and whatever else takes just that.

A destination that is called `….safetensors` asks for it (`writers`). A folder of safetensors holds
all of a training state; one file holds the model's tensors, and nothing is left out unsaid.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.findings import finding
from ftckpt.formats.huggingface.config import is_partial
from ftckpt.formats.huggingface.sidecar_files import beside_weights
from ftckpt.formats.state.paths import with_aliases
from ftckpt.strict_json import shown
from ftckpt.transfer.content import Content, Shard, TargetTensor
from ftckpt.transfer.layout import Elements, Layout, LayoutRequest, Literal, OutputFile

from .header import MAX_HEADER, MAX_TENSORS, PREFIX
from .names import SUFFIX
from .tensor_names import Alias, metadata, stored_name

_ALIGNMENT = 8
# Codes in the order of `enum Dtype`: by width, then as they came to be.
_CODES = """
    BOOL F4 F6_E2M3 F6_E3M2 U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ I16 U16 F16 BF16
    I32 U32 F32 C64 F64 I64 U64
"""
_ORDER = {code: number for number, code in enumerate(_CODES.split())}


def require_storable(name: str, shard: Shard) -> None:
    """Refuse what no safetensors file can hold.

    Raises:
        UnsupportedError: the type has no code, the elements do not fill whole bytes, or the name
            is not text or is the header's own.
    """
    dtype = shard.dtype
    if dtype.safetensors not in _ORDER:
        raise UnsupportedError(
            f"safetensors has no type for {name}, which is {dtype.name}",
            hint="--drop leaves a tensor out, and a format of torch.save holds every type",
            tensor=name,
        )
    if shard.numel * dtype.bits % 8:
        raise UnsupportedError(
            f"{name} has {shard.numel} elements of {dtype.bits} bits, which do not fill whole "
            "bytes, so that safetensors cannot hold it",
            tensor=name,
        )
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise UnsupportedError(
            f"the name {shown(name)} is not text, so that safetensors cannot hold it", tensor=name
        ) from error
    if name == "__metadata__":
        raise UnsupportedError("safetensors cannot hold a tensor named __metadata__", tensor=name)


def lay_out_file(
    path: str, tensors: Mapping[str, Shard], metadata: Mapping[str, str]
) -> OutputFile:
    """Lay out one file.

    Args:
        path: where, relative to the destination.
        tensors: by the name that the header shall give them.
        metadata: of the header; its keys stand there in this order.

    Raises:
        UnsupportedError: a tensor or a name that the format cannot hold, or more of them than a
            header of 100 MB can name, or than readers accept.
    """
    if len(tensors) > MAX_TENSORS:
        raise _too_many(path, f"hold {len(tensors)} tensors, over the {MAX_TENSORS} that are read")
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    in_order = sorted(tensors, key=lambda n: (-_ORDER.get(tensors[n].dtype.safetensors, 0), n))
    for name in in_order:
        shard = tensors[name]
        require_storable(name, shard)
        begin, end = end, end + shard.nbytes
        header[name] = {
            "dtype": shard.dtype.safetensors,
            "shape": list(shard.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > MAX_HEADER:
        limit = f"over the format's {MAX_HEADER}"
        raise _too_many(path, f"need a header of {len(text)} bytes, {limit}")
    prefix = len(text).to_bytes(PREFIX, "little")
    elements = [Elements.all(tensors[name]) for name in in_order]
    return OutputFile(path, [Literal(prefix + text), *elements])


def _too_many(path: str, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{path} would {what}",
        hint="a folder spreads the tensors over more files, by a smaller --max-shard-size",
        file=path,
    )


class StoredOnce:
    """The tensors that are stored, and the aliases of each.

    Attributes:
        components: component -> stored name -> tensor, the model's first; components of which
            nothing is stored are not there.
    """

    components: Mapping[str, Mapping[str, TargetTensor]]

    def __init__(self, content: Content) -> None:
        self._content = content = with_aliases(content)
        self._partial = content.partial or is_partial(content.checkpoint)
        owners = _owners(content)
        found: dict[str, dict[str, TargetTensor]] = {"model": {}}
        for key, wanted in content.tensors.items():
            if key not in owners:
                found.setdefault(wanted.component, {})[stored_name(wanted)] = wanted
        self.components = {component: tensors for component, tensors in found.items() if tensors}
        self._aliases: dict[str, list[Alias]] = {}
        for key, owner in owners.items():
            alias = content.tensors[key]
            stored = stored_name(content.tensors[owner])
            one = Alias(alias.component, alias.kind, alias.name, stored)
            self._aliases.setdefault(owner, []).append(one)

    def file(
        self, path: str, component: str, names: Iterable[str], *, label: str = ""
    ) -> OutputFile:
        """Lay out one file of a component's tensors.

        Args:
            path: where, relative to the destination.
            component: whose.
            names: stored names of the tensors.
            label: what the file says of whose they are; "" for `component`.

        Raises:
            UnsupportedError: see `lay_out_file`.
        """
        held = {name: self.components[component][name] for name in names}
        shared = [alias for w in held.values() for alias in self._aliases.get(w.key, ())]
        shards = {name: self._content.whole(wanted.key) for name, wanted in held.items()}
        return lay_out_file(path, shards, metadata(label or component, held, shared, self._partial))


def _owners(content: Content) -> dict[str, str]:
    """Return the key of the tensor that is stored in the place of each alias.

    An alias of another component or form is stored of itself: it may not be an alias any more.
    """
    found = {}
    for key, owner in content.aliases.items():
        seen = {key}
        while owner in content.aliases and owner not in seen:
            seen.add(owner)
            owner = content.aliases[owner]
        alias, stored = content.tensors.get(key), content.tensors.get(owner)
        if alias is None or stored is None or owner in seen:
            continue
        same = (alias.component, alias.shape, alias.dtype)
        if same == (stored.component, stored.shape, stored.dtype):
            found[key] = owner
    return found


FILE = f"model{SUFFIX}"


class SafetensorsFileWriter:
    """Writes one file of the format `safetensors` (see the module's docstring)."""

    name = "safetensors"
    single = True
    supported_options = ("max_shard_size",)

    def layout(self, content: Content, request: LayoutRequest) -> Layout:
        """Lay out the weights; all other state is `unplaced`.

        Raises:
            UsageError: the file should be divided by size.
            UnsupportedError: a tensor that safetensors cannot hold, by its name, or more of them
                than a header has room for; or the model has no tensor.
        """
        if request.max_shard_size is not None:
            raise UsageError(
                f"a name that ends in {SUFFIX} asks for one file, and --max-shard-size for several",
                hint="DST/ with a slash at its end, or another name, makes a folder",
            )
        stored = StoredOnce(content)
        if "model" not in stored.components:
            raise UnsupportedError(
                f"one safetensors file holds a model's tensors, and there is none to write of"
                f" {content.checkpoint.source.url}",
                hint="--to torchsave holds what else there is in one file",
            )
        others = [key for key, w in content.tensors.items() if w.component != "model"]
        beside = [file.path for file in beside_weights(content)]
        notes = []
        if beside:
            what = f"one file has no place for {', '.join(beside)}: not written"
            notes.append(finding("note", what))
        return Layout(
            files=[stored.file(FILE, "model", stored.components["model"])],
            unplaced=[*others, *content.objects],
            notes=notes,
        )
