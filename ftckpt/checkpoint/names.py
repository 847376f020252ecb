"""Remove what wrappers add to parameter names, and remember it.

`DistributedDataParallel` puts `module.` before every name; `torch.compile` puts `_orig_mod.` before
the compiled module, FSDP1 `_fsdp_wrapped_module.` and activation checkpointing
`_checkpoint_wrapped_module.`, at any depth. The last three are private names of torch that no
trainer gives to its own module, so they are removed everywhere. `module` is a word, so it is
removed only if every name begins with it.
"""

from __future__ import annotations

from collections.abc import Iterable

_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_DDP = "module."


def unwrapped(names: Iterable[str]) -> dict[str, str]:
    """Return stored name -> name in the unwrapped model, in the same order.

    If two stored names would become one, nothing is removed: the wrapper then distinguishes them.
    """
    stored = list(dict.fromkeys(names))
    bare = {name: _without_wrappers(name) for name in stored}
    while bare and all(len(n) > len(_DDP) and n.startswith(_DDP) for n in bare.values()):
        bare = {name: _without_wrappers(n.removeprefix(_DDP)) for name, n in bare.items()}
    if len(set(bare.values())) != len(bare):
        return {name: name for name in stored}
    return bare


def as_stored(name: str, stored: str) -> str:
    """Return a parameter's name with the wrappers that it is stored with: `_orig_mod.0.weight`.

    Args:
        name: in the unwrapped model.
        stored: the format's name; keys above the model may stand in front.
    """
    parts, left = stored.split("."), name.split(".")
    at = len(parts)
    while at and left and (parts[at - 1] == left[-1] or parts[at - 1] in _WRAPPERS):
        at -= 1
        if parts[at] == left[-1]:
            left.pop()
    if left:
        return name  # it is stored under another one, as layers in a stack are
    while at and parts[at - 1] in (*_WRAPPERS, _DDP[:-1]):
        at -= 1
    return ".".join(parts[at:])


def _without_wrappers(name: str) -> str:
    if "_orig_mod" not in name and "_wrapped_module" not in name:
        return name
    parts = name.split(".")
    kept = [part for part in parts[:-1] if part not in _WRAPPERS]
    return ".".join([*kept, parts[-1]])


def record_names(objects: Iterable[str]) -> frozenset[str]:
    """Return the names of objects, also without keys in front that a trainer wraps its state in.

    A tensor subclass is listed as the tensors inside (`model.w` as `w.codes` and `w.scale`) and as
    an object, its record. Keys in front are at most three: `app.state.model`.
    """
    return frozenset(name.split(".", cut)[-1] for name in objects for cut in range(4))
