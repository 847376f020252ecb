"""No machine has much more to do than another, whatever the sizes of the files."""

from __future__ import annotations

import random
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from ftckpt.digests.blocks import block_count, block_length
from ftckpt.extents import BLOCK
from ftckpt.parts.shares import ByteRow
from ftckpt.transfer.staging.remote import RemoteStaging

PARTS = 100


def states() -> Mapping[str, list[int]]:
    """Return sizes of files, in blocks, of several checkpoints."""
    chosen = random.Random(24)
    return {
        "a little less than a share": [97 * BLOCK - 5] * 102,
        "half a share": [50 * BLOCK] * 199,
        "drawn": [round(BLOCK * chosen.lognormvariate(3, 1.5)) for _ in range(300)],
        "one is half of all": [5000 * BLOCK, *[50 * BLOCK] * 100],
    }


@pytest.mark.parametrize("state", states())
@pytest.mark.parametrize("bucket", [False, True])
def test_the_largest_share(state: str, bucket: bool) -> None:
    """A copy's: by blocks on a disk, by whole files and blocks of larger ones in a bucket."""
    sizes = {f"{number:04}": size for number, size in enumerate(states()[state])}
    store: Any = SimpleNamespace(traits=SimpleNamespace(joint_uploads=True))
    row, mean = ByteRow.of(sizes.items()), sum(sizes.values()) / PARTS
    held = [0] * PARTS
    for name, size in sizes.items():
        if bucket and not RemoteStaging(store).cuts(size, -(-sum(sizes.values()) // PARTS)):
            held[row.part(name, 0, size, PARTS)] += size
            continue
        for number in range(block_count(size)):
            length = block_length(size, number)
            held[row.part(name, number * BLOCK, length, PARTS)] += length
    assert sum(held) == sum(sizes.values())
    most = mean / 4 if bucket else BLOCK
    assert max(held) <= mean + max(most, BLOCK)
