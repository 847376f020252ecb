"""Write the golden delta, which later versions must read: python -m tests.data.delta.make_delta

Two steps of AdamW on a small parameter, the first packed whole and the second against it, with one
tensor for each form.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import xxhash

from ftckpt.delta import NAME, FitSettings
from tests.delta.packing import State, pack, trained

HERE = Path(__file__).parent


def states() -> list[State]:
    base, target = trained(size=(40, 30))
    rng = np.random.default_rng(4)
    counts = rng.integers(0, 50, 3000).astype(np.int32)
    flags = rng.integers(0, 2, 4000).astype(np.uint8)
    sparse = rng.standard_normal(3000).astype(np.float32)
    for state, extra in ((base, 0), (target, 1)):
        state.add("counts", "int32", (3000,), counts + extra * 3)
        state.add("flags", "bool", (4000,), flags ^ extra * (rng.random(4000) < 0.01).astype("u1"))
        state.add("frozen", "float32", (100,), sparse[:100])
        state.add("noise", "uint8", (2000,), rng.bytes(2000))
        moved = sparse + np.float32(extra) * (rng.random(3000) < 0.05)
        state.add("sparse", "float32", (3000,), moved.astype(np.float32))
        half = sparse + np.float32(extra) * (rng.random(3000) < 0.5)
        state.add("half", "float32", (3000,), half.astype(np.float32))
        state.add("scalar", "int64", (), np.array(7 + extra))
    return [base, target]


def main() -> None:
    base, target = states()
    packed = pack(
        target,
        base,
        settings=FitSettings(0.9, 0.95, 1e-8, 1e-3, 0.1, 2, 1),
        objects={"lr": b"1e-3"},
    )
    for folder, delta in ((HERE / "base", pack(base)), (HERE, packed)):
        folder.mkdir(exist_ok=True)
        (folder / NAME).write_bytes(delta.index.dump())
        for name, data in delta.files.items():
            (folder / name).write_bytes(data)
    sums = {key: xxhash.xxh3_128_hexdigest(data) for key, data in target.data.items()}
    (HERE / "elements.json").write_text(json.dumps(sums, indent=1) + "\n")
    print(sorted({block.form.name for block in packed.blocks}))


if __name__ == "__main__":
    main()
