"""The options that `plan` and `plan sweep` share: what fails, what a save costs, what must hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer


@dataclass(frozen=True, kw_only=True)
class FailureOptions:
    """What stops the job, and how often."""

    TITLE: ClassVar[str] = "Failures (RATE is 50000h, 9%/y, 2300FIT or 0.0065/node-day)"

    gpus: Annotated[
        str, typer.Option(metavar="N", help="GPUs of the job: 16384 or 16k (k is 1024).")
    ] = ""
    gpu_mtbf: Annotated[str, typer.Option(metavar="RATE", help="Failures of one GPU.")] = ""
    gpus_per_node: Annotated[
        int, typer.Option(metavar="N", min=1, help="GPUs per node, for rates of nodes and hosts.")
    ] = 8
    hosts: Annotated[
        str, typer.Option(metavar="N", help="Hosts; by default GPUs / GPUs per node.")
    ] = ""
    host_mtbf: Annotated[str, typer.Option(metavar="RATE", help="Failures of one host.")] = ""
    switches: Annotated[str, typer.Option(metavar="N", help="Network switches.")] = ""
    switch_mtbf: Annotated[str, typer.Option(metavar="RATE", help="Failures of one switch.")] = ""
    nics: Annotated[str, typer.Option(metavar="N", help="NICs; by default one a GPU.")] = ""
    nic_mtbf: Annotated[str, typer.Option(metavar="RATE", help="Failures of one NIC.")] = ""
    psus: Annotated[
        str, typer.Option(metavar="N", help="Power supplies; by default one a host.")
    ] = ""
    psu_mtbf: Annotated[str, typer.Option(metavar="RATE", help="Failures of one power supply.")] = (
        ""
    )
    hbm_mtbf: Annotated[
        str,
        typer.Option(metavar="RATE", help="Failures of one GPU's memory, on top of --gpu-mtbf."),
    ] = ""
    component: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=N@RATE", help="Any other part: cdu=64@20000h. Repeatable."),
    ] = None
    job_mtbf: Annotated[
        str, typer.Option(metavar="T", help="Time between failures of the job's own software.")
    ] = ""
    mtbf: Annotated[
        str, typer.Option(metavar="T", help="Time between failures of the whole job.")
    ] = ""
    failures: Annotated[
        str, typer.Option(metavar="N/T", help="Counted failures in a time: 419/54d.")
    ] = ""
    preset: Annotated[str, typer.Option(metavar="NAME", help="A published run: see --presets.")] = (
        ""
    )
    burn_in: Annotated[
        str, typer.Option(metavar="X", help="Multiply the rate, for new machines: 1.3.")
    ] = "1"


@dataclass(frozen=True, kw_only=True)
class CostOptions:
    """What a save and a failure cost."""

    TITLE: ClassVar[str] = "Costs"

    save: Annotated[
        str, typer.Option(metavar="T", help="How long training waits for a save: 60s.")
    ] = ""
    nbytes: Annotated[
        str, typer.Option("--bytes", metavar="SIZE", help="Size of a checkpoint: 5.7TB.")
    ] = ""
    params: Annotated[
        str, typer.Option(metavar="N", help="Parameters of the model: 405B or 405e9.")
    ] = ""
    bytes_per_param: Annotated[
        str,
        typer.Option(metavar="X", help="A number, or PRECISION-OPTIMIZER: see --presets."),
    ] = "bf16-adamw"
    ranks: Annotated[
        str, typer.Option(metavar="N", help="Ranks that write at once; by default the GPUs.")
    ] = ""
    write_bw: Annotated[
        str, typer.Option(metavar="RATE", help="Write rate of one rank: 5GB/s, 400Gb/s.")
    ] = ""
    storage_bw: Annotated[
        str, typer.Option(metavar="RATE", help="Write rate of the storage, all ranks: 80GB/s.")
    ] = ""
    read_bw: Annotated[
        str,
        typer.Option(metavar="RATE", help="Read rate of the storage, all ranks; adds the load."),
    ] = ""
    snapshot_bw: Annotated[
        str,
        typer.Option(metavar="RATE", help="GPU to host memory of one rank; makes saves async."),
    ] = ""
    snapshot: Annotated[
        str, typer.Option(metavar="T", help="Async: how long training waits for the snapshot.")
    ] = ""
    flush: Annotated[
        str, typer.Option(metavar="T", help="Async: how long writing takes in the background.")
    ] = ""
    slowdown: Annotated[
        str, typer.Option(metavar="X", help="Async: how much slower training is meanwhile: 2%.")
    ] = "0%"
    tier: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=V,...",
            help="A place that saves go to: name=ram,cost=0.5s,restore=5s,covers=78%, or in place "
            "of covers, replicas=2,lost=3 (nodes at once). Repeatable, the fastest first.",
        ),
    ] = None
    detect: Annotated[
        str, typer.Option(metavar="T", help="Time from a failure until a replacement is there.")
    ] = ""
    restart: Annotated[
        str,
        typer.Option(
            metavar="T",
            help="Time to start and load, until training goes on; with --read-bw, to start alone.",
        ),
    ] = ""
    notice: Annotated[
        str, typer.Option(metavar="T", help="Spot: warning before a preemption: 120s.")
    ] = ""
    preempt_mtbf: Annotated[
        str, typer.Option(metavar="T", help="Spot: time between preemptions of the job.")
    ] = ""
    notice_reliability: Annotated[
        str, typer.Option(metavar="X", help="Spot: share of preemptions that are announced.")
    ] = "100%"
    silent_mtbf: Annotated[
        str, typer.Option(metavar="T", help="Time between silent errors of the job.")
    ] = ""
    verify_cost: Annotated[
        str, typer.Option(metavar="T", help="Checking for silent errors before each save.")
    ] = ""
    weights_between: Annotated[
        int, typer.Option(metavar="N", min=0, help="Weights-only saves between two full ones.")
    ] = 0
    weights_save: Annotated[
        str, typer.Option(metavar="T", help="Pause for one; else the weights' share of a save.")
    ] = ""
    rewarm: Annotated[
        str,
        typer.Option(
            metavar="T",
            help="Work lost by a restart from weights alone, besides: 1h. Else none is made.",
        ),
    ] = ""
    step_time: Annotated[str, typer.Option(metavar="T", help="One training step: 4.2s.")] = ""


@dataclass(frozen=True, kw_only=True)
class BoundOptions:
    """What must hold, and what is paid."""

    TITLE: ClassVar[str] = "Bounds, storage and money"

    max_loss: Annotated[
        str, typer.Option(metavar="T", help="Lose no more work than this at a failure: 5m.")
    ] = ""
    max_overhead: Annotated[str, typer.Option(metavar="X", help="Spend no more on saving: 1%.")] = (
        ""
    )
    host_ram: Annotated[
        str, typer.Option(metavar="SIZE", help="Memory of a host for staging snapshots: 512GiB.")
    ] = ""
    buffers: Annotated[
        int, typer.Option(metavar="N", min=1, help="Snapshots that are held at once.")
    ] = 2
    detection_latency: Annotated[
        str, typer.Option(metavar="T", help="How long a silent error stays unseen, on average.")
    ] = ""
    keep_last: Annotated[
        int, typer.Option(metavar="N", min=1, help="Checkpoints that are kept.")
    ] = 3
    keep_every: Annotated[
        int, typer.Option(metavar="N", min=0, help="Keep every Nth for ever; 0 keeps none.")
    ] = 0
    milestones: Annotated[
        int, typer.Option(metavar="N", min=0, help="Others that are kept for ever.")
    ] = 0
    run: Annotated[
        str, typer.Option(metavar="T", help="Length of the run on the wall clock: 54d.")
    ] = ""
    gpu_hour: Annotated[
        str, typer.Option(metavar="PRICE", help="Price of a GPU-hour: 2.33 or 2.10EUR.")
    ] = ""
    tb_month: Annotated[
        str, typer.Option(metavar="PRICE", help="Price of a TB-month of storage.")
    ] = ""
