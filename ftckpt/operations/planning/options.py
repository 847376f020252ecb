"""The options that `plan` and `plan sweep` share: what fails, what a save costs, what must hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from ftckpt.operations.definition import option


@dataclass(frozen=True, kw_only=True)
class FailureOptions:
    """What stops the job, and how often."""

    TITLE: ClassVar[str] = "Failures (RATE is 50000h, 9%/y, 2300FIT or 0.0065/node-day)"

    gpus: Annotated[str, option("N", "GPUs of the job: 16384 or 16k (k is 1024).")] = ""
    gpu_mtbf: Annotated[str, option("RATE", "Failures of one GPU.")] = ""
    gpus_per_node: Annotated[
        int, option("N", "GPUs per node, for rates of nodes and hosts.", min=1)
    ] = 8
    hosts: Annotated[str, option("N", "Hosts; by default GPUs / GPUs per node.")] = ""
    host_mtbf: Annotated[str, option("RATE", "Failures of one host.")] = ""
    switches: Annotated[str, option("N", "Network switches.")] = ""
    switch_mtbf: Annotated[str, option("RATE", "Failures of one switch.")] = ""
    nics: Annotated[str, option("N", "NICs; by default one a GPU.")] = ""
    nic_mtbf: Annotated[str, option("RATE", "Failures of one NIC.")] = ""
    psus: Annotated[str, option("N", "Power supplies; by default one a host.")] = ""
    psu_mtbf: Annotated[str, option("RATE", "Failures of one power supply.")] = ""
    hbm_mtbf: Annotated[
        str, option("RATE", "Failures of one GPU's memory, on top of --gpu-mtbf.")
    ] = ""
    component: Annotated[
        list[str] | None, option("NAME=N@RATE", "Any other part: cdu=64@20000h. Repeatable.")
    ] = None
    job_mtbf: Annotated[str, option("T", "Time between failures of the job's own software.")] = ""
    mtbf: Annotated[str, option("T", "Time between failures of the whole job.")] = ""
    failures: Annotated[str, option("N/T", "Counted failures in a time: 419/54d.")] = ""
    preset: Annotated[str, option("NAME", "A published run: see --presets.")] = ""
    burn_in: Annotated[str, option("X", "Multiply the rate, for new machines: 1.3.")] = "1"


@dataclass(frozen=True, kw_only=True)
class CostOptions:
    """What a save and a failure cost."""

    TITLE: ClassVar[str] = "Costs"

    save: Annotated[str, option("T", "How long training waits for a save: 60s.")] = ""
    nbytes: Annotated[str, option("SIZE", "Size of a checkpoint: 5.7TB.", "--bytes")] = ""
    params: Annotated[str, option("N", "Parameters of the model: 405B or 405e9.")] = ""
    bytes_per_param: Annotated[
        str, option("X", "A number, or PRECISION-OPTIMIZER: see --presets.")
    ] = "bf16-adamw"
    ranks: Annotated[str, option("N", "Ranks that write at once; by default the GPUs.")] = ""
    write_bw: Annotated[str, option("RATE", "Write rate of one rank: 5GB/s, 400Gb/s.")] = ""
    storage_bw: Annotated[str, option("RATE", "Write rate of the storage, all ranks: 80GB/s.")] = ""
    read_bw: Annotated[
        str, option("RATE", "Read rate of the storage, all ranks; adds the load.")
    ] = ""
    snapshot_bw: Annotated[
        str, option("RATE", "GPU to host memory of one rank; makes saves async.")
    ] = ""
    snapshot: Annotated[str, option("T", "Async: how long training waits for the snapshot.")] = ""
    flush: Annotated[str, option("T", "Async: how long writing takes in the background.")] = ""
    slowdown: Annotated[str, option("X", "Async: how much slower training is meanwhile: 2%.")] = (
        "0%"
    )
    tier: Annotated[
        list[str] | None,
        option(
            "KEY=V,...",
            "A place that saves go to: name=ram,cost=0.5s,restore=5s,covers=78%, or in place "
            "of covers, replicas=2,lost=3 (nodes at once). Repeatable, the fastest first.",
        ),
    ] = None
    detect: Annotated[str, option("T", "Time from a failure until a replacement is there.")] = ""
    restart: Annotated[
        str,
        option(
            "T", "Time to start and load, until training goes on; with --read-bw, to start alone."
        ),
    ] = ""
    notice: Annotated[str, option("T", "Spot: warning before a preemption: 120s.")] = ""
    preempt_mtbf: Annotated[str, option("T", "Spot: time between preemptions of the job.")] = ""
    notice_reliability: Annotated[
        str, option("X", "Spot: share of preemptions that are announced.")
    ] = "100%"
    silent_mtbf: Annotated[str, option("T", "Time between silent errors of the job.")] = ""
    verify_cost: Annotated[str, option("T", "Checking for silent errors before each save.")] = ""
    weights_between: Annotated[
        int, option("N", "Weights-only saves between two full ones.", min=0)
    ] = 0
    weights_save: Annotated[
        str, option("T", "Pause for one; else the weights' share of a save.")
    ] = ""
    rewarm: Annotated[
        str,
        option("T", "Work lost by a restart from weights alone, besides: 1h. Else none is made."),
    ] = ""
    step_time: Annotated[str, option("T", "One training step: 4.2s.")] = ""


@dataclass(frozen=True, kw_only=True)
class BoundOptions:
    """What must hold, and what is paid."""

    TITLE: ClassVar[str] = "Bounds, storage and money"

    max_loss: Annotated[str, option("T", "Lose no more work than this at a failure: 5m.")] = ""
    max_overhead: Annotated[str, option("X", "Spend no more on saving: 1%.")] = ""
    host_ram: Annotated[str, option("SIZE", "Memory of a host for staging snapshots: 512GiB.")] = ""
    buffers: Annotated[int, option("N", "Snapshots that are held at once.", min=1)] = 2
    detection_latency: Annotated[
        str, option("T", "How long a silent error stays unseen, on average.")
    ] = ""
    keep_last: Annotated[int, option("N", "Checkpoints that are kept.", min=1)] = 3
    keep_every: Annotated[int, option("N", "Keep every Nth for ever; 0 keeps none.", min=0)] = 0
    milestones: Annotated[int, option("N", "Others that are kept for ever.", min=0)] = 0
    run: Annotated[str, option("T", "Length of the run on the wall clock: 54d.")] = ""
    gpu_hour: Annotated[str, option("PRICE", "Price of a GPU-hour: 2.33 or 2.10EUR.")] = ""
    tb_month: Annotated[str, option("PRICE", "Price of a TB-month of storage.")] = ""
