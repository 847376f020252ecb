"""`ftckpt plan elastic`: batch, accumulation and learning rate on another number of GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.render import brief_duration, table
from ftckpt.errors import ExitCode
from ftckpt.operations import estimating

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftckpt.operations.estimating import ElasticReport

operation = estimating.plan_elastic


def render(invocation: Invocation, report: ElasticReport, _: Mapping[str, Any]) -> Result:
    """Print the ways to go on, and what to wait for."""
    from ftckpt.planning.models.arithmetic import percent_change

    rows = [
        [way.name, way.per_gpu, way.accumulation, f"{way.batch:,}",
         percent_change(way.batch_change), f"{way.lr_linear:.4g}", f"{way.lr_sqrt:.4g}",
         f"{way.steps:.3f}x", f"{way.step_time:.3f}x", f"{way.memory:.3f}x", way.keeps]
        for way in report.options
    ]  # fmt: skip
    head = ["way", "per GPU>", "passes>", "batch>", "change>", "lr linear>", "lr sqrt>", "steps>",
            "step time>", "activations>", "keeps"]  # fmt: skip
    invocation.print(table(head, rows))
    after = f"{report.inputs['to_gpus']:,}"
    if report.grow_above_s is not None:
        stay = brief_duration(report.grow_above_s)
        invocation.print()
        invocation.print(f"go on with {after} if they stay longer than {stay}")
    if report.shrink_above_s is not None:
        wait = brief_duration(report.shrink_above_s)
        invocation.print()
        invocation.print(f"wait for spares that come within {wait}; else go on with {after}")
    return Result(ExitCode.OK, f"{len(report.options)} ways to go on with {after} GPUs")
