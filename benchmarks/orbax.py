"""Orbax: `convert` to safetensors against Orbax and safetensors themselves, and `inspect`.

    python benchmarks/orbax.py --python PYTHON [--size 2GB] [--arrays 10000] [--rounds 3]

PYTHON has orbax-checkpoint, jax, flax and safetensors; it saves the data and is the peer. Both
sides are timed as commands. ftckpt checks the source and proves the result; the peer does neither.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import side_by_side
from side_by_side import Contestant

from ftckpt.amounts import size as size_in_bytes

SAVE = """
import os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
import numpy as np, jax, orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
path, count, rows, columns = sys.argv[1], *map(int, sys.argv[2:])
mesh = Mesh(np.array(jax.devices()), ("fsdp",))
place = NamedSharding(mesh, P("fsdp") if rows % 8 == 0 else P())
rng = np.random.default_rng(0)
tree = {}
for n in range(count):
    values = rng.standard_normal((rows, columns), np.float32)
    tree[f"layer_{n}"] = {"kernel": jax.device_put(values, place)}
with ocp.StandardCheckpointer() as one:
    one.save(path, {"params": tree})
"""
PEER = """
import os, sys
os.environ["JAX_PLATFORMS"] = "cpu"
import numpy as np, jax, orbax.checkpoint as ocp
from safetensors.flax import save_file
handler = ocp.PyTreeCheckpointHandler()
with ocp.Checkpointer(handler) as one:
    tree = one.metadata(sys.argv[1]).item_metadata.tree
    plain = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    tree = one.restore(sys.argv[1], args=ocp.args.PyTreeRestore(restore_args=plain))
flat, _ = jax.tree_util.tree_flatten_with_path(tree)
save_file({jax.tree_util.keystr(p, simple=True, separator="."): a for p, a in flat}, sys.argv[2])
"""
COLUMNS, COUNT = 2048, 16


def save(python: str, path: Path, count: int, rows: int, columns: int) -> None:
    """Let Orbax save `count` arrays."""
    if not path.exists():
        words = [str(path), str(count), str(rows), str(columns)]
        subprocess.run([python, "-c", SAVE, *words], check=True, stderr=subprocess.DEVNULL)


def main() -> None:
    """Compare, and print."""
    parser = side_by_side.arguments(__doc__ or "", size="2GB", rounds=3)
    parser.add_argument("--python", required=True, help="a Python that has Orbax")
    parser.add_argument("--arrays", type=int, default=10_000, help="for inspect")
    asked = parser.parse_args()
    size: int = size_in_bytes(asked.size)
    with side_by_side.workplace(asked.dir) as folder:
        source, out = folder / "state", folder / "out"
        save(asked.python, source, COUNT, size // COUNT // COLUMNS // 4 // 8 * 8, COLUMNS)
        convert = (*side_by_side.ftckpt_command(), "convert", str(source), str(out))
        convert += ("--to", "safetensors")
        peer = (asked.python, "-c", PEER, str(source), str(out))

        def empty() -> None:
            side_by_side.remove(out, source)

        def timed(command: tuple[str, ...]) -> int:
            side_by_side.used_by(*command)
            return size

        rows = side_by_side.compare(
            [
                Contestant("ftckpt convert", lambda: timed(convert), True, empty),
                Contestant("Orbax restore, safetensors save", lambda: timed(peer), False, empty),
            ],
            asked.rounds,
        )
        memory = {}
        for name, command in (("ftckpt", convert), ("Orbax", peer)):
            empty()
            memory[f"most memory, {name}"] = f"{side_by_side.peak_memory(*command)} MiB"
        side_by_side.show(f"convert {asked.size} of Orbax", rows, memory, as_json=asked.json)
        many = folder / "many"
        save(asked.python, many, asked.arrays, 4, 4)
        inspect = (*side_by_side.ftckpt_command(), "inspect", str(many))
        rows = side_by_side.compare(
            [Contestant("ftckpt inspect", lambda: timed(inspect), True)], asked.rounds
        )
        title = f"inspect {asked.arrays} arrays"
        used = side_by_side.used_by(*inspect)
        seconds = {"processor time": f"{used.ru_utime + used.ru_stime:.2f} s"}
        side_by_side.show(title, rows, seconds, as_json=asked.json)


if __name__ == "__main__":
    main()
