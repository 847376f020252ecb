"""`ftckpt plan compress`: when compressing a checkpoint makes the save shorter."""

from __future__ import annotations

from typing import Annotated

from ftckpt.amounts import decimal_bytes
from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.render import brief_duration, table
from ftckpt.errors import ExitCode, UsageError
from ftckpt.operations.definition import option
from ftckpt.planning import quantities
from ftckpt.planning.models import compression

STORAGE = False
EXAMPLES = (
    (
        "ftckpt plan compress --size 100GB --ratio 2.5 --codec-bw 4GB/s --storage-bw 10GB/s",
        "three ways to save, and the bandwidths that decide",
    ),
    (
        "ftckpt plan compress --size 5.7TB --ratio 1.5 --codec-bw 200GB/s --storage-bw 80GB/s",
        "the same with the codec of all ranks together",
    ),
)
CODES = {ExitCode.OK: "printed", ExitCode.USAGE: "an option without its unit, or no number"}


def command(
    invocation: Invocation,
    size: Annotated[str, option("SIZE", "Size of the checkpoint: 5.7TB.")],
    ratio: Annotated[str, option("X", "Size before over size after compression: 1.5.")],
    codec_bw: Annotated[str, option("RATE", "Input rate of the codec, all ranks together.")],
    storage_bw: Annotated[str, option("RATE", "Write rate of the storage: 80GB/s.")],
) -> Result:
    """Compute whether compressing a checkpoint makes the save shorter.

    Compressed first and written then, it wins where storage is slower than codec x (1 - 1/ratio);
    with both at once, where storage is slower than the codec itself.
    """
    inputs = {
        "bytes": quantities.size(size, "--size"),
        "ratio": quantities.factor(ratio, "--ratio"),
        "codec_bytes_per_s": quantities.bandwidth(codec_bw, "--codec-bw"),
        "storage_bytes_per_s": quantities.bandwidth(storage_bw, "--storage-bw"),
    }
    if not inputs["bytes"] > 0:
        raise UsageError(f"--size {size}: this must be above zero")
    found = compression.compare(*inputs.values())
    times = {
        "uncompressed": float(found.plain),
        "compressed, then written": float(found.sequential),
        "both at once": float(found.pipelined),
    }
    best = min(times, key=lambda way: times[way])
    invocation.report(inputs=inputs, times=found, best=best)
    limits = ["", f"below {decimal_bytes(float(found.sequential_below))}/s",
              f"below {decimal_bytes(float(found.pipelined_below))}/s"]  # fmt: skip
    rows = [
        [way, brief_duration(seconds), f"{times['uncompressed'] / seconds:.2f}x", limit,
         "<" if way == best else ""]
        for (way, seconds), limit in zip(times.items(), limits, strict=True)
    ]  # fmt: skip
    invocation.print(table(["save", "takes>", "speed-up>", "wins where storage is>", ""], rows))
    message = f"the shortest save is {best}: {brief_duration(times[best])}"
    invocation.print()
    invocation.print(message)
    return Result(ExitCode.OK, message)
