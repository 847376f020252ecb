"""Restore steps with Orbax, and say what it restored: `python orbax_job.py SPEC`.

Runs in Orbax's own environment and knows nothing of ftckpt. SPEC is JSON: `steps`, a list of
{"path": of a step, "item": of its tree, "whole": whether the manager restores all its items,
"host": whether it was saved over a mesh that is not here, "sharded": whether to restore over a mesh
of 8 devices}. Prints a JSON list: of each step, by the
path in the tree, the type, shape and SHA-256 of each leaf.
"""

# mypy: ignore-errors
# JAX and its libraries are in no environment of the tests.

import hashlib
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def key(path):
    return ".".join(str(next(getattr(one, n) for n in ("key", "idx", "name") if hasattr(one, n)))
                    for one in path)  # fmt: skip


def leaf(value):
    if isinstance(value, str):
        return ["str", [], value]
    array = np.asarray(value)
    return [str(array.dtype), list(array.shape), hashlib.sha256(array.tobytes()).hexdigest()]


def said(tree):
    return {key(path): leaf(value) for path, value in jax.tree_util.tree_flatten_with_path(tree)[0]}


def mesh():
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


def spread(array):
    """Return a target that is cut over the mesh wherever its axes divide."""
    axes = zip(("data", "model"), (4, 2), array.shape, strict=False)
    spec = [name if size % parts == 0 else None for name, parts, size in axes]
    return jax.ShapeDtypeStruct(
        array.shape, array.dtype, sharding=NamedSharding(mesh(), PartitionSpec(*spec))
    )


def restored(step):
    path = Path(step["path"])
    item = path / step["item"]
    if step["whole"]:
        with ocp.CheckpointManager(path.parent) as manager:
            assert manager.latest_step() == int(path.name)
            manager.restore(int(path.name))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as one:
        if step["host"]:
            tree = one.metadata(item).item_metadata.tree
            numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
            tree = one.restore(item, args=ocp.args.PyTreeRestore(restore_args=numpy))
        else:
            tree = one.restore(item)
    if step["sharded"]:
        arrays = jax.tree.map(lambda a: isinstance(a, np.ndarray | jax.Array) and a.ndim > 0, tree)
        target = jax.tree.map(lambda a, is_one: spread(a) if is_one else a, tree, arrays)
        with ocp.StandardCheckpointer() as one:
            again = one.restore(item, target)
        assert said(again) == said(tree)
        cut = [a for a in jax.tree.leaves(again) if isinstance(a, jax.Array) and a.ndim]
        assert any(len(a.sharding.device_set) == 8 for a in cut)
    return said(tree)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    spec = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps([restored(step) for step in spec["steps"]]))
