"""Prepare tensors for safetensors files: each once, under its stored name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ftckpt.formats.huggingface.config import is_partial
from ftckpt.formats.state.paths import with_aliases
from ftckpt.transfer.content import Content, TargetTensor
from ftckpt.transfer.layout import OutputFile

from .layout import lay_out_file
from .tensor_names import Alias, metadata, stored_name


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
