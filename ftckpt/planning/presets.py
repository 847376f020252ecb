"""Failure rates of published training runs, as data, each with its source.

A preset is another cluster: a starting point without own measurements, and the answer says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ftckpt.amounts import DAY
from ftckpt.errors import UsageError


@dataclass(frozen=True, slots=True)
class Preset:
    """The failures of one published run.

    Attributes:
        name: the value of `--preset`.
        run: the training run and its machines.
        gpus: size of the cluster; None if the source gives only a rate.
        failures: that stopped the job; None if the source gives only a rate.
        seconds: of observation.
        per_gpu: failures per second and GPU.
        classes: failures by cause, if the source counts them; they sum to `failures`.
        source: the publication.
        remark: for its user.
    """

    name: str
    run: str
    gpus: int | None
    failures: int | None
    seconds: float | None
    per_gpu: float
    source: str
    remark: str = ""
    classes: Mapping[str, int] = field(default_factory=dict)


def _counted(
    name: str,
    run: str,
    gpus: int,
    failures: int,
    days: float,
    source: str,
    remark: str = "",
    classes: Mapping[str, int] | None = None,
) -> Preset:
    rate = failures / (days * DAY) / gpus
    return Preset(name, run, gpus, failures, days * DAY, rate, source, remark, classes or {})


def _rated(name: str, run: str, per_node_day: float, source: str, remark: str = "") -> Preset:
    """Return a preset from failures per node-day, of nodes with 8 GPUs."""
    return Preset(name, run, None, None, None, per_node_day / 8 / DAY, source, remark)


_RSC = "Kokolis et al., Revisiting Reliability in Large-Scale ML Research Clusters, HPCA 2025"
_SMALL_JOBS = (
    "jobs of 1,024 GPUs failed every 7.9 h and not every 28.8 h as this rate says: "
    "software fails small jobs more often than hardware does"
)

PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        _counted(
            "llama3",
            "Llama 3 405B on 16,384 H100",
            16_384,
            419,
            54,
            "The Llama 3 Herd of Models, 2024, table 5 (arXiv 2407.21783)",
            "unexpected interruptions only; 47 planned ones are left out",
            {
                "faulty GPU": 148,
                "HBM3": 72,
                "software": 54,
                "network switch or cable": 35,
                "host maintenance": 32,
                "GPU SRAM": 19,
                "GPU system processor": 17,
                "NIC": 7,
                "NCCL watchdog": 7,
                "silent data corruption": 6,
                "GPU thermal": 6,
                "SSD": 3,
                "power supply": 3,
                "server chassis": 2,
                "IO expansion board": 2,
                "dependency": 2,
                "CPU": 2,
                "system memory": 2,
            },
        ),
        _rated("rsc1", "Meta RSC-1, A100", 6.50e-3, f"{_RSC} (arXiv 2410.21680)", _SMALL_JOBS),
        _rated("rsc2", "Meta RSC-2, A100", 2.34e-3, f"{_RSC} (arXiv 2410.21680)", _SMALL_JOBS),
        _counted(
            "opt175b",
            "OPT-175B on 1,024 A100",
            1_024,
            90,
            56,
            "facebookresearch/metaseq, OPT-175B chronicles, final update",
            "about 90 restarts of the whole lineage, those by hand included",
        ),
    )
}


def preset(name: str) -> Preset:
    """Return a preset by name.

    Raises:
        UsageError: unknown name.
    """
    found = PRESETS.get(name)
    if found is None:
        raise UsageError(f"unknown preset {name!r}", hint=f"presets: {', '.join(PRESETS)}")
    return found
