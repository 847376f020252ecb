"""Save small training states by Orbax itself, and what it restores from them, for the tests.

Run with a Python that has orbax-checkpoint, jax, flax, optax and safetensors:

    python make_orbax.py [DIRECTORY [NAME ...]]

Each sample is a folder `NAME`; `NAME.safetensors` beside it holds every array as Orbax's own
restore gave it back, by its path in the tree.
"""

# mypy: ignore-errors
# JAX and its libraries are in no environment of the tests.

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.flax import save_file

HERE = Path(__file__).resolve().parent


def key(path):
    parts = []
    for one in path:
        for field in ("key", "idx", "name"):
            if hasattr(one, field):
                parts.append(str(getattr(one, field)))
                break
    return ".".join(parts)


def truth(root, name, tree):
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    wide = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
    with wide(True):
        arrays = {
            key(path): jnp.asarray(np.asarray(leaf))
            for path, leaf in leaves
            if not isinstance(leaf, str)
        }
        save_file(arrays, root / f"{name}.safetensors")


def handler(**options):
    return ocp.PyTreeCheckpointHandler(**options)


def save(root, name, tree, **options):
    target = root / name
    shutil.rmtree(target, ignore_errors=True)
    with ocp.Checkpointer(handler(**options)) as one:
        one.save(target, args=ocp.args.PyTreeSave(tree))
        truth(root, name, one.restore(target))


def everything():
    """Return one leaf of each kind."""
    key = jax.random.key(0)
    return {
        "f32": jnp.linspace(-1, 1, 12, dtype=jnp.float32).reshape(3, 4),
        "bf16": jnp.linspace(-2, 2, 10).astype(jnp.bfloat16).reshape(2, 5),
        "f16": jnp.ones((2, 2), jnp.float16),
        "e4m3": jnp.linspace(-4, 4, 8).astype(jnp.float8_e4m3fn),
        "e5m2": jnp.linspace(-4, 4, 8).astype(jnp.float8_e5m2),
        "i8": jnp.arange(-4, 4, dtype=jnp.int8),
        "u32": jnp.arange(6, dtype=jnp.uint32).reshape(2, 3),
        "flag": jnp.array([True, False, True]),
        "c64": jnp.array([1 + 2j, 3 - 4j], jnp.complex64),
        "zeros": jnp.zeros((4, 4), jnp.float32),
        "zero_d": jnp.asarray(7, jnp.int32),
        "np": {"f64": np.linspace(0, 1, 5), "i64": np.arange(3)},
        "large": jax.random.normal(key, (64, 48), jnp.float32),
        "number": 3,
        "fraction": 0.25,
        "word": "a string",
        "nothing": None,
        "no_dict": {},
        "no_list": [],
        "listed": [jnp.arange(2), jnp.arange(3)],
        "pair": (jnp.arange(4), 5),
        "dotted.name": jnp.arange(5),
    }


def mesh():
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


def sharded():
    """Return a state over 8 devices: cut by both axes, by one, with replicas, unevenly."""
    grid = mesh()

    def put(array, *spec):
        return jax.device_put(array, NamedSharding(grid, P(*spec)))

    def values(*shape):
        return jax.random.normal(jax.random.key(sum(shape)), shape, jnp.float32)

    params = {
        "embed": put(values(16, 8).astype(jnp.bfloat16), "data", "model"),
        "layers": {
            "0": {"kernel": put(values(8, 12), None, "model"), "bias": put(values(12), "model")},
            "1": {"kernel": put(values(8, 8), "data", None), "bias": put(values(8))},
        },
        "whole": put(values(5, 3)),
        "outside": put(values(64, 36), "data", "model"),
    }
    return {"params": params, "step": put(jnp.asarray(30, jnp.int32))}


def trained(optimizer, steps):
    """Return params and the state of an optimizer after a few updates."""
    params = {
        "embed": {"table": jnp.ones((6, 4), jnp.float32)},
        "dense": {"kernel": jnp.full((4, 4), 0.5), "bias": jnp.zeros(4)},
    }
    state = optimizer.init(params)
    for number in range(steps):
        grads = jax.tree.map(lambda p, n=number: jnp.cos(p + n), params)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return {"params": params, "opt_state": state, "step": steps}


def adamw():
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))


def multi():
    labels = {"embed": {"table": "slow"}, "dense": {"kernel": "fast", "bias": "fast"}}
    return optax.multi_transform(
        {"slow": optax.sgd(1e-2, momentum=0.9), "fast": optax.adam(1e-3)}, labels
    )


def train_state(root, name):
    """Save a flax TrainState whole, as trainers do."""
    from flax.training import train_state as flax_state

    state = trained(adamw(), 3)
    whole = flax_state.TrainState(
        step=jnp.asarray(3), apply_fn=None, params=state["params"], tx=None,
        opt_state=state["opt_state"],
    )  # fmt: skip
    target = root / name
    shutil.rmtree(target, ignore_errors=True)
    with ocp.StandardCheckpointer() as one:
        one.save(target, whole)
        one.wait_until_finished()
        truth(root, name, one.restore(target))


def manager(root, name):
    """Save a root with three steps, of several items and with metrics."""
    target = root / name
    shutil.rmtree(target, ignore_errors=True)
    options = ocp.CheckpointManagerOptions(max_to_keep=3)
    with ocp.CheckpointManager(target, options=options) as one:
        for step in (10, 20, 30):
            state = sharded()
            state["step"] = jnp.asarray(step, jnp.int32)
            one.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state),
                    data=ocp.args.JsonSave({"epoch": 1, "offset": step * 8, "shards": ["a", "b"]}),
                ),
                metrics={"loss": 1.0 / step},
            )
        one.wait_until_finished()
        got = one.restore(30)
        truth(root, name, {"state": got["state"]})


def plain_manager(root, name):
    """Save a root whose steps hold one item, `default`."""
    target = root / name
    shutil.rmtree(target, ignore_errors=True)
    with ocp.CheckpointManager(target) as one:
        one.save(5, args=ocp.args.StandardSave({"w": jnp.arange(6.0), "step": 5}))
        one.wait_until_finished()
        truth(root, name, one.restore(5))


def processes(root, name):
    """Save by two processes of two devices each."""
    target = root / name
    shutil.rmtree(target, ignore_errors=True)
    env = dict(os.environ, XLA_FLAGS="--xla_force_host_platform_device_count=2")
    jobs = [
        subprocess.Popen([sys.executable, __file__, "--process", str(n), str(target)], env=env)
        for n in range(2)
    ]
    assert [job.wait() for job in jobs] == [0, 0]
    with ocp.Checkpointer(handler()) as one:
        found = one.metadata(target)
        tree = found.item_metadata.tree if hasattr(found, "item_metadata") else found
        restore = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        truth(root, name, one.restore(target, args=ocp.args.PyTreeRestore(restore_args=restore)))


def process(number, target):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize("localhost:17391", 2, number)
    grid = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))

    def put(array, *spec):
        place = NamedSharding(grid, P(*spec))
        return jax.make_array_from_callback(array.shape, place, lambda at: array[at])

    tree = {
        "rows": put(np.arange(32, dtype=np.float32).reshape(8, 4), "data", None),
        "both": put(np.arange(64, dtype=np.float32).reshape(8, 8), "data", "model"),
        "whole": put(np.arange(9, dtype=np.int32)),
        "step": put(np.asarray(4, np.int32)),
    }
    with ocp.Checkpointer(handler()) as one:
        one.save(target, args=ocp.args.PyTreeSave(tree))


def edges(root, name, *, zarr3):
    """Save arrays whose chunks do not divide them, written again by tensorstore."""
    import tensorstore

    target = root / name
    shutil.rmtree(target, ignore_errors=True)
    arrays = {
        "raw": np.arange(70, dtype=np.float32).reshape(10, 7),
        "packed": np.arange(1500, dtype=np.int16).reshape(50, 30),
    }
    save(root, name, arrays, use_ocdbt=False, use_zarr3=zarr3)
    for key, array in arrays.items():
        sizes = [4, 3] if key == "raw" else [16, 20]
        if zarr3:
            pack = [{"name": "zstd", "configuration": {"level": 3}}] if key == "packed" else []
            inner = [{"name": "bytes", "configuration": {"endian": "little"}}, *pack]
            index = [*inner[:1], {"name": "crc32c"}]
            sharding = {
                "chunk_shape": [n // 2 or 1 for n in sizes[:1]] + sizes[1:],
                "codecs": [*inner, {"name": "crc32c"}],
                "index_codecs": index,
                "index_location": "start" if key == "raw" else "end",
            }
            grid = {"name": "regular", "configuration": {"chunk_shape": sizes}}
            metadata = {
                "chunk_grid": grid,
                "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
            }
        else:
            packer = {"id": "zstd", "level": 1} if key == "packed" else None
            metadata = {"chunks": sizes, "compressor": packer}
        spec = {
            "driver": "zarr3" if zarr3 else "zarr",
            "create": True,
            "delete_existing": True,
            "store_data_equal_to_fill_value": True,
            "dtype": str(array.dtype),
            "kvstore": {"driver": "file", "path": f"{target}/{key}/"},
            "metadata": metadata | {"shape": list(array.shape)},
        }
        tensorstore.open(spec).result().write(array).result()
    with ocp.Checkpointer(handler(use_ocdbt=False, use_zarr3=zarr3)) as one:
        truth(root, name, one.restore(target))


def codecs(root, name):
    """Save arrays in other compressors than Orbax's own, written again by tensorstore."""
    import tensorstore

    target = root / name
    shutil.rmtree(target, ignore_errors=True)
    array = (np.arange(700) // 3).astype(np.float32).reshape(50, 14)
    blosc = {"clevel": 5, "blocksize": 0}
    packers = {
        "lz4": blosc | {"id": "blosc", "cname": "lz4", "shuffle": 1},
        "bits": blosc | {"id": "blosc", "cname": "zstd", "shuffle": 2},
        "deflated": blosc | {"id": "blosc", "cname": "zlib", "shuffle": 0},
        "gzip": {"id": "gzip", "level": 6},
        "zlib": {"id": "zlib", "level": 6},
    }
    save(root, name, dict.fromkeys(packers, array), use_ocdbt=False)
    for key, packer in packers.items():
        tensorstore.open({
            "driver": "zarr", "create": True, "delete_existing": True, "dtype": "float32",
            "kvstore": {"driver": "file", "path": f"{target}/{key}/"},
            "metadata": {"shape": [50, 14], "chunks": [30, 14], "compressor": packer},
        }).result().write(array).result()  # fmt: skip
    with ocp.Checkpointer(handler(use_ocdbt=False)) as one:
        truth(root, name, one.restore(target))


def codecs_zarr3(root, name):
    """Save arrays in shards and chunks of zarr 3's other compressors."""
    import tensorstore

    target = root / name
    shutil.rmtree(target, ignore_errors=True)
    array = (np.arange(700) // 3).astype(np.float32).reshape(50, 14)
    raw = {"name": "bytes", "configuration": {"endian": "little"}}
    blosc = {"clevel": 5, "blocksize": 0, "typesize": 4, "cname": "lz4", "shuffle": "shuffle"}
    packers = {
        "gzip": [raw, {"name": "gzip", "configuration": {"level": 6}}],
        "blosc": [raw, {"name": "blosc", "configuration": blosc}],
    }
    packers["checked"] = [*packers["gzip"], {"name": "crc32c"}]
    packers["shards"] = [{"name": "sharding_indexed", "configuration": {
        "chunk_shape": [10, 7], "codecs": packers["blosc"],
        "index_codecs": [raw, {"name": "crc32c"}],
    }}]  # fmt: skip
    save(root, name, dict.fromkeys(packers, array), use_ocdbt=False, use_zarr3=True)
    for key, packer in packers.items():
        grid = {"name": "regular", "configuration": {"chunk_shape": [30, 14]}}
        tensorstore.open({
            "driver": "zarr3", "create": True, "delete_existing": True, "dtype": "float32",
            "kvstore": {"driver": "file", "path": f"{target}/{key}/"},
            "metadata": {"shape": [50, 14], "chunk_grid": grid, "codecs": packer},
        }).result().write(array).result()  # fmt: skip
    with ocp.Checkpointer(handler(use_ocdbt=False, use_zarr3=True)) as one:
        truth(root, name, one.restore(target))


def second(root, name):
    """Save a root by Orbax's second interface, with metrics and an item of JSON."""
    import orbax.checkpoint.experimental.v1 as second_interface

    target = root / name
    shutil.rmtree(target, ignore_errors=True)
    tree = {"params": {"w": jnp.arange(6.0)}, "step": jnp.asarray(5)}
    with second_interface.training.Checkpointer(target) as one:
        items = {"state": tree, "data": {"offset": 40}}
        one.save_checkpointables(5, items, metrics={"loss": 1.0})
    truth(root, name, second_interface.load_checkpointables(target / "5")["state"])


SAMPLES = {
    "everything": lambda root, name: save(root, name, everything()),
    "everything_zarr3": lambda root, name: save(root, name, everything(), use_zarr3=True),
    "raw": lambda root, name: save(root, name, sharded(), use_compression=False),
    "raw_zarr3": lambda root, name: save(
        root, name, sharded(), use_compression=False, use_zarr3=True
    ),
    "sharded": lambda root, name: save(root, name, sharded()),
    "sharded_zarr3": lambda root, name: save(root, name, sharded(), use_zarr3=True),
    "files": lambda root, name: save(root, name, sharded(), use_ocdbt=False),
    "files_zarr3": lambda root, name: save(
        root, name, sharded(), use_ocdbt=False, use_zarr3=True
    ),
    "adamw": lambda root, name: save(root, name, trained(adamw(), 3)),
    "multi": lambda root, name: save(root, name, trained(multi(), 2)),
    "train_state": train_state,
    "manager": manager,
    "plain_manager": plain_manager,
    "processes": processes,
    "edges": lambda root, name: edges(root, name, zarr3=False),
    "edges_zarr3": lambda root, name: edges(root, name, zarr3=True),
    "codecs": codecs,
    "codecs_zarr3": codecs_zarr3,
    "second": second,
}  # fmt: skip


def main(words):
    if words[:1] == ["--process"]:
        process(int(words[1]), words[2])
        return
    root = Path(words[0]).resolve() if words else HERE
    root.mkdir(parents=True, exist_ok=True)
    for name in words[1:] or SAMPLES:
        SAMPLES[name](root, name)
        print(name)
    versions = {one.__name__.split(".")[0]: one.__version__ for one in (jax, optax)}
    (root / "versions.json").write_text(json.dumps(versions | {"orbax": ocp.__version__}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
