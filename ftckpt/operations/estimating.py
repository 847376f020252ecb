"""Numbers about a run before it begins: `plan risk`, `plan elastic`, `plan compress`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from ftckpt.errors import ExitCode, UsageError
from ftckpt.observer import SILENT, Observer

from .definition import operation, option

if TYPE_CHECKING:
    from ftckpt.planning.models.arithmetic import ElasticOption
    from ftckpt.planning.models.storage import Compression


@dataclass(frozen=True, kw_only=True)
class RiskReport:
    """How likely a run is to fail.

    Attributes:
        inputs: the numbers that were given, in seconds and failures a second.
        mtbf_s: mean seconds until the first failure.
        probability: of one failure or more.
        expected_failures: their mean number.
        log10_completion_s: of the mean time to finish without checkpoints.
        log10_slowdown: of that time over the work.
    """

    inputs: Mapping[str, float]
    mtbf_s: float
    probability: float
    expected_failures: float
    log10_completion_s: float
    log10_slowdown: float


@operation(
    examples=(
        ("ftckpt plan risk --gpus 1024 --gpu-mtbf 9%/y --run 30d", "a month on a thousand GPUs"),
        (
            "ftckpt plan risk --gpus 1024 --gpu-mtbf 2300FIT --run 30d --restart 10m",
            "with restarts",
        ),
        (
            "ftckpt plan risk --gpus 16384 --gpu-mtbf 50000h --run 54d --restart 10m",
            "any form of a failure rate will do",
        ),
    ),
    codes={ExitCode.OK: "printed", ExitCode.USAGE: "an option without its unit, or no number"},
)
def plan_risk(
    *,
    gpus: Annotated[int | str, option("N", "GPUs of the job: 16384 or 16k.")],
    gpu_mtbf: Annotated[str, option("RATE", "Failures of one GPU: 9%/y, 50000h, 2300FIT.")],
    run: Annotated[str, option("T", "Work in the run: 54d.")],
    restart: Annotated[str, option("T", "Time from a failure until training goes on: 10m.")] = "0s",
    on: Observer = SILENT,
) -> RiskReport:
    """Compute how likely a run is to fail, and its time unsaved.

    Without checkpoints every failure begins the run anew, and the mean time to finish soon has more
    digits than seconds have names; it is computed as a logarithm.

    Raises:
        UsageError: a number is none, or lacks its unit.
    """
    from ftckpt.planning import quantities, risk

    number = quantities.count(str(gpus), "--gpus", kilo=1024)
    rate = number * quantities.failure_rate(gpu_mtbf, "--gpu-mtbf", annual=True)
    seconds = quantities.duration(run, "--run")
    if not 0 < seconds < math.inf:
        raise UsageError(f"--run {run}: a run takes more than no time", hint="write 30d")
    again = quantities.duration(restart, "--restart")
    power = risk.log10_completion(seconds, 1 / rate, restart=again)
    return RiskReport(
        inputs={
            "gpus": number, "per_gpu_per_s": rate / number, "seconds": seconds, "restart_s": again,
        },
        mtbf_s=float(risk.time_to_first(rate)),
        probability=float(risk.probability(rate, seconds)),
        expected_failures=float(risk.expected_failures(rate, seconds)),
        log10_completion_s=power,
        log10_slowdown=power - math.log10(seconds),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ElasticReport:
    """Ways to go on with another number of GPUs.

    Attributes:
        inputs: the numbers that were given.
        options: the ways.
        shrink_above_s: spares that come within as many seconds are worth waiting for; None where
            that was not asked.
        grow_above_s: more GPUs that stay longer are worth a restart; None likewise.
    """

    inputs: Mapping[str, float]
    options: Sequence[ElasticOption]
    shrink_above_s: float | None = None
    grow_above_s: float | None = None


@operation(
    examples=(
        (
            "ftckpt plan elastic --from 64 --to 48 --batch 2048 --lr 1e-3",
            "what each way to go on keeps and changes",
        ),
        (
            "ftckpt plan elastic --from 8 --to 7 --batch 8 --lr 1e-3 --restart 6m",
            "and whether to wait for spares",
        ),
        (
            "ftckpt plan elastic --from 6 --to 8 --batch 6 --lr 1e-3 --restart 6m",
            "capacity comes back: how long it must stay to be worth a restart",
        ),
    ),
    codes={
        ExitCode.OK: "printed",
        ExitCode.USAGE: "a number is none, or the batch does not divide",
    },
)
def plan_elastic(
    *,
    from_: Annotated[int | str, option("N", "Data-parallel GPUs so far.", "--from")],
    to: Annotated[int | str, option("N", "Data-parallel GPUs from now on.")],
    batch: Annotated[int | str, option("N", "Global batch so far, in samples.")],
    lr: Annotated[float | str, option("X", "Learning rate so far: 1e-3.")],
    accumulation: Annotated[int, option("N", "Passes that make one step, so far.", min=1)] = 1,
    restart: Annotated[str, option("T", "Time to stop, reshard and go on: 6m.")] = "",
    on: Observer = SILENT,
) -> ElasticReport:
    """Compute batch and learning rate for fewer or more GPUs.

    No way keeps everything. The learning rate follows the batch linearly (SGD) or with its square
    root (Adam and its kin); which holds for a model is for an experiment to say.

    Raises:
        UsageError: a number is none, or lacks its unit; or the batch does not divide.
    """
    from ftckpt.planning import quantities
    from ftckpt.planning.models import arithmetic

    before = quantities.count(str(from_), "--from", kilo=1024)
    after = quantities.count(str(to), "--to", kilo=1024)
    samples = quantities.count(str(batch), "--batch", kilo=1024)
    rate = quantities.factor(str(lr), "--lr")
    inputs = {
        "from_gpus": before, "to_gpus": after, "batch": samples, "lr": rate,
        "accumulation": accumulation,
    }  # fmt: skip
    ways = arithmetic.options(before, after, samples, rate, accumulation)
    if not restart:
        return ElasticReport(inputs=inputs, options=ways)
    if after == before:
        raise UsageError("--restart weighs another number of GPUs, and it is the same")
    seconds = quantities.duration(restart, "--restart")
    if after > before:
        stay = arithmetic.grow_above(seconds, before, after - before)
        return ElasticReport(inputs=inputs, options=ways, grow_above_s=stay)
    wait = arithmetic.shrink_above(seconds, before, before - after)
    return ElasticReport(inputs=inputs, options=ways, shrink_above_s=wait)


@dataclass(frozen=True, kw_only=True)
class CompressionReport:
    """Whether compressing makes a save shorter.

    Attributes:
        inputs: the numbers that were given, in bytes and bytes a second.
        times: of the ways to save, and the bandwidths that decide.
        best: the shortest way: `uncompressed`, `compressed, then written` or `both at once`.
    """

    inputs: Mapping[str, float]
    times: Compression
    best: str


@operation(
    examples=(
        (
            "ftckpt plan compress --bytes 1TB --ratio 2 --codec-bw 4GB/s --storage-bw 9GB/s",
            "three ways to save, and the bandwidths that decide",
        ),
        (
            "ftckpt plan compress --bytes 1TB --ratio 2 --codec-bw 4GB/s --storage-bw 2GB/s",
            "the same to slower storage",
        ),
        (
            "ftckpt plan compress --bytes 1TB --ratio 3 --codec-bw 1GB/s --storage-bw 2GB/s",
            "with a slower codec that compresses more",
        ),
        (
            "ftckpt plan compress --bytes 5.7TB --ratio 1.5 --codec-bw 200GB/s --storage-bw 80GB/s",
            "the same with the codec of all ranks together",
        ),
    ),
    codes={ExitCode.OK: "printed", ExitCode.USAGE: "an option without its unit, or no number"},
)
def plan_compress(
    *,
    nbytes: Annotated[str, option("SIZE", "Size of the checkpoint: 5.7TB.", "--bytes")],
    ratio: Annotated[float | str, option("X", "Size before over size after compression: 1.5.")],
    codec_bw: Annotated[str, option("RATE", "Input rate of the codec, all ranks together.")],
    storage_bw: Annotated[str, option("RATE", "Write rate of the storage: 80GB/s.")],
    on: Observer = SILENT,
) -> CompressionReport:
    """Compute whether compressing a checkpoint makes a save shorter.

    Compressed first and written then, it wins where storage is slower than codec x (1 - 1/ratio);
    with both at once, where storage is slower than the codec itself.

    Raises:
        UsageError: a number is none, or lacks its unit.
    """
    from ftckpt.planning import quantities
    from ftckpt.planning.models import storage

    inputs = {
        "bytes": quantities.size(nbytes, "--bytes"),
        "ratio": quantities.factor(str(ratio), "--ratio"),
        "codec_bytes_per_s": quantities.bandwidth(codec_bw, "--codec-bw"),
        "storage_bytes_per_s": quantities.bandwidth(storage_bw, "--storage-bw"),
    }
    if not inputs["bytes"] > 0:
        raise UsageError(f"--bytes {nbytes}: this must be above zero")
    found = storage.compare(*inputs.values())
    times = {
        "uncompressed": float(found.plain),
        "compressed, then written": float(found.sequential),
        "both at once": float(found.pipelined),
    }
    return CompressionReport(
        inputs=inputs, times=found, best=min(times, key=lambda way: times[way])
    )
