"""Flip bits in the JSON files of the samples, and record what Orbax makes of each.

Run with a Python that has orbax-checkpoint and jax: `python make_flips.py [PER_FILE]`. Written to
`flips.json`: by sample and file, the flips (byte and bit) that Orbax restores as before, those of
which it restores other values, and those at which it fails. Compressed nodes of a database have
their CRC-32C, and every flip in them is found (`test_ocdbt.py`), so only JSON is flipped.
"""

# mypy: ignore-errors
# JAX and its libraries are in no environment of the tests.

import hashlib
import json
import logging
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import orbax.checkpoint as ocp

HERE = Path(__file__).resolve().parent
SAMPLES = (
    "adamw", "edges_zarr3", "everything", "everything_zarr3", "files", "multi", "raw",
    "sharded", "sharded_zarr3",
)  # fmt: skip
NAMES = ("_METADATA", "_sharding", ".zarray", "zarr.json", "_strings.json")


def items(step):
    """Return the folders of a step's trees."""
    return sorted(path.parent for path in step.rglob("_METADATA"))


def restored(step):
    """Return every leaf of every tree, by its path, as bytes with shape and type."""
    found = {}
    for item in items(step):
        tree = ocp.PyTreeCheckpointer().restore(item)
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            name = f"{item.relative_to(step)}{jax.tree_util.keystr(path)}"
            if isinstance(leaf, str):
                found[name] = leaf
            else:
                value = np.asarray(leaf)
                found[name] = (str(value.dtype), value.shape, value.tobytes())
    return found


def verdict_of(step):
    """Return a digest of all that is restored, or "fails"; in a process of its own.

    A restore that fails leaves Orbax's loop of events closed for the next one.
    """
    reads, writes = os.pipe()
    if not os.fork():
        said = "fails"
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            found = sorted(restored(step).items())
            said = hashlib.sha256(repr(found).encode()).hexdigest()
        finally:
            os.write(writes, said.encode())
            os._exit(0)
    os.close(writes)
    with open(reads) as answer:
        said = answer.read()
    os.wait()
    return said


def flipped_files(step):
    return [
        path for path in sorted(step.rglob("*"))
        if path.is_file() and (path.name in NAMES or path.parent.name == "array_metadatas")
    ]  # fmt: skip


def main(count):
    logging.disable(logging.CRITICAL)
    draw = random.Random(38)
    said = {"versions": {"orbax": ocp.__version__, "jax": jax.__version__}, "flips": {}}
    with tempfile.TemporaryDirectory() as place:
        for sample in SAMPLES:
            step = Path(shutil.copytree(HERE / sample, Path(place) / sample))
            truth = verdict_of(step)
            assert truth != "fails", sample
            for file in flipped_files(step):
                data = file.read_bytes()
                places = [(at, bit) for at in range(len(data)) for bit in range(8)]
                row = {"same": [], "other": [], "fails": []}
                for at, bit in sorted(draw.sample(places, min(count, len(places)))):
                    file.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
                    said_ = verdict_of(step)
                    verdict = "same" if said_ == truth else "fails" if said_ == "fails" else "other"
                    row[verdict].append([at, bit])
                file.write_bytes(data)
                name = f"{sample}/{file.relative_to(step)}"
                said["flips"][name] = row
                print(name, {k: len(v) for k, v in row.items()}, flush=True)
    text = json.dumps(said, separators=(",", ":"))
    (HERE / "flips.json").write_text(text.replace('"' + SAMPLES[0], '\n"' + SAMPLES[0]) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
