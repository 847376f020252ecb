"""`ftckpt plan elastic`: batch, accumulation and learning rate on another number of GPUs."""

from __future__ import annotations

from typing import Annotated

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.render import brief_duration, table
from ftckpt.errors import ExitCode, UsageError
from ftckpt.operations.definition import option
from ftckpt.planning import quantities
from ftckpt.planning.models import elastic

STORAGE = False
EXAMPLES = (
    (
        "ftckpt plan elastic --from-gpus 64 --to-gpus 48 --batch 2048 --lr 1e-3",
        "what each way to go on keeps and changes",
    ),
    (
        "ftckpt plan elastic --from-gpus 1024 --to-gpus 1016 --batch 4096 --lr 3e-4 --reshard 6m",
        "and whether to wait for spares",
    ),
    (
        "ftckpt plan elastic --from-gpus 48 --to-gpus 64 --batch 1920 --lr 1e-3 --reshard 6m",
        "capacity comes back: how long it must stay to be worth a restart",
    ),
)
CODES = {ExitCode.OK: "printed", ExitCode.USAGE: "a number is none, or the batch does not divide"}


def command(
    invocation: Invocation,
    from_gpus: Annotated[str, option("N", "Data-parallel GPUs so far.")],
    to_gpus: Annotated[str, option("N", "Data-parallel GPUs from now on.")],
    batch: Annotated[str, option("N", "Global batch so far, in samples.")],
    lr: Annotated[str, option("X", "Learning rate so far: 1e-3.")],
    accumulation: Annotated[int, option("N", "Passes that make one step, so far.", min=1)] = 1,
    reshard: Annotated[str, option("T", "Time to stop, reshard and go on: 6m.")] = "",
) -> Result:
    """Compute batch, accumulation and learning rate for fewer or more GPUs.

    No way keeps everything. The learning rate follows the batch linearly (SGD) or with its square
    root (Adam and its kin); which holds for a model is for an experiment to say.
    """
    before = quantities.count(from_gpus, "--from-gpus", kilo=1024)
    after = quantities.count(to_gpus, "--to-gpus", kilo=1024)
    samples = quantities.count(batch, "--batch", kilo=1024)
    rate = quantities.factor(lr, "--lr")
    ways = elastic.options(before, after, samples, rate, accumulation)
    invocation.report(
        inputs={"from_gpus": before, "to_gpus": after, "batch": samples, "lr": rate,
                "accumulation": accumulation},
        options=ways,
        shrink_above_s=None,
        grow_above_s=None,
    )  # fmt: skip
    rows = [
        [way.name, way.per_gpu, way.accumulation, f"{way.batch:,}",
         elastic.percent_change(way.batch_change), f"{way.lr_linear:.4g}", f"{way.lr_sqrt:.4g}",
         f"{way.steps:.3f}x", f"{way.step_time:.3f}x", f"{way.memory:.3f}x", way.keeps]
        for way in ways
    ]  # fmt: skip
    head = ["way", "per GPU>", "passes>", "batch>", "change>", "lr linear>", "lr sqrt>", "steps>",
            "step time>", "activations>", "keeps"]  # fmt: skip
    invocation.print(table(head, rows))
    if reshard:
        if after == before:
            raise UsageError("--reshard weighs another number of GPUs, and it is the same")
        seconds = quantities.duration(reshard, "--reshard")
        if after > before:
            stay = elastic.grow_above(seconds, before, after - before)
            invocation.report(grow_above_s=stay)
            advice = f"go on with {after:,} if they stay longer than {brief_duration(stay)}"
        else:
            wait = elastic.shrink_above(seconds, before, before - after)
            invocation.report(shrink_above_s=wait)
            advice = f"wait for spares that come within {brief_duration(wait)}"
            advice = f"{advice}; else go on with {after:,}"
        invocation.print()
        invocation.print(advice)
    return Result(ExitCode.OK, f"{len(ways)} ways to go on with {after:,} GPUs")
