"""The kinds of failure, and what each says about the part that failed.

The names of GPU faults follow NVIDIA's list of Xid errors
(https://docs.nvidia.com/deploy/xid-errors/, and `nverror.h` of its open kernel modules): its
"immediate action" tells a fault of the hardware from one of the program.
"""

from __future__ import annotations

from .entries import Fault, Weight

GPU_LOST = Fault("gpu-lost", "gpu", 10, "a GPU has fallen off the bus")
GPU_MEMORY = Fault("gpu-memory", "hbm", 11, "uncorrectable error of a GPU's memory (ECC)")
NVLINK = Fault("nvlink", "nvlink", 12, "error of NVLink or NVSwitch")
GPU_DRIVER = Fault("gpu-driver", "gpu", 13, "the GPU's firmware or driver does not answer")
NODE = Fault("node", "host", 20, "a node failed or does not answer")
HOST_MEMORY = Fault("host-memory", "host", 30, "the host ran out of memory")
DISK_FULL = Fault("disk-full", "storage", 31, "no space left, or a quota is used up")
STORAGE = Fault("storage", "storage", 32, "a file could not be read or written")
PREEMPTED = Fault("preempted", "scheduler", 33, "preempted")
GPU_OUT_OF_MEMORY = Fault("gpu-out-of-memory", "software", 40, "the program asked for more memory")
GPU_FAULT = Fault("gpu-fault", "software", 41, "the program made an invalid access on a GPU")
NETWORK = Fault("network", "network", 45, "a connection between nodes broke")
EXCEPTION = Fault("exception", "software", 50, "a Python exception")
CRASHED = Fault("crashed", "software", 55, "a process died of a fault (SIGSEGV, SIGABRT, SIGBUS)")
# torch's watchdog aborts the process that has waited too long: after it, this is a consequence.
ABORTED = CRASHED._replace(order=56)
KILLED = Fault("killed", "unknown", 60, "a process was killed (SIGKILL) and nothing says by whom")
HUNG = Fault("hung", "unknown", 65, "no progress for too long")
COLLECTIVE_TIMEOUT = Fault(
    "collective-timeout", "unknown", 70, "ranks waited for one that did not come"
)
COLLECTIVE_ERROR = Fault("collective-error", "unknown", 75, "a rank lost the others")
FAILED = Fault("failed", "unknown", 90, "the job ended with an error, and nothing says why")
# Training began anew at an earlier step: a node that loses its power writes no line.
UNSAID = Fault("unknown", "unknown", 95, "steps were done again, and no line says why")

ALL = (
    GPU_LOST, GPU_MEMORY, NVLINK, GPU_DRIVER, NODE, HOST_MEMORY, DISK_FULL, STORAGE, PREEMPTED,
    GPU_OUT_OF_MEMORY, GPU_FAULT, NETWORK, EXCEPTION, CRASHED, KILLED, HUNG, COLLECTIVE_TIMEOUT,
    COLLECTIVE_ERROR, FAILED,
)  # fmt: skip
BY_NAME = {fault.name: fault for fault in ALL}
# Those that report such a failure are the ones that it left alive.
TOLD_BY_OTHERS = frozenset({NODE.name, PREEMPTED.name})

# Xids that say what was wrong with the job's GPU. Others (45 clears up after another error, 63 and
# 92 count corrected ones, 154 names an action) accompany a failure.
_XIDS: dict[int, tuple[Fault, Weight]] = {
    **dict.fromkeys((13, 31, 32, 43, 69), (GPU_FAULT, Weight.FATAL)),
    **dict.fromkeys((48, 64, 94, 95, 140), (GPU_MEMORY, Weight.FATAL)),
    **dict.fromkeys((63, 92, 160), (GPU_MEMORY, Weight.HINT)),
    **dict.fromkeys((61, 62, 109, 119, 120, 143, 158), (GPU_DRIVER, Weight.FATAL)),
    **dict.fromkeys((74, 137, 144, 145, 146, 147, 148, 149, 150), (NVLINK, Weight.FATAL)),
    **dict.fromkeys((38, 46, 54, 79, 110), (GPU_LOST, Weight.FATAL)),
}


def of_xid(number: int) -> tuple[Fault, Weight]:
    """Return what an Xid says; unknown numbers are hints at the GPU."""
    return _XIDS.get(number, (GPU_DRIVER, Weight.HINT))


# Causes of one component are one class in a record that gives only a component.
_OF_COMPONENT = {
    "gpu": GPU_LOST, "hbm": GPU_MEMORY, "nvlink": NVLINK, "host": NODE, "storage": STORAGE,
    "network": NETWORK, "scheduler": PREEMPTED,
}  # fmt: skip
_LONGEST = 60


def of_record(name: str, component: str) -> Fault:
    """Return the fault of a record that names a class, a component, or none of them.

    A name that is not one of ours stays as it is; a part in it (`gpu`, `nic`) is its component.
    """
    name, component = name.strip()[:_LONGEST], component.strip()[:_LONGEST]
    known = BY_NAME.get(name.lower().replace("_", "-").replace(" ", "-"))
    if known is not None:
        return known._replace(component=component or known.component)
    if not name and component in _OF_COMPONENT:
        return Fault(component, component, FAILED.order, f"a failure of {component}")
    return Fault(name or "unknown", component or _part(name), FAILED.order, "as the log names it")


def _part(name: str) -> str:
    """Return the component that a name speaks of."""
    words = name.lower().replace("-", " ").replace("_", " ").split()
    for part, signs in (
        ("hbm", {"hbm", "hbm3", "ecc", "sram"}),
        ("nvlink", {"nvlink", "nvswitch"}),
        ("gpu", {"gpu", "xid", "cuda"}),
        ("network", {"nic", "network", "switch", "cable", "ib", "link", "nccl"}),
        ("storage", {"storage", "disk", "ssd", "nfs", "lustre", "filesystem"}),
        ("host", {"host", "node", "cpu", "psu", "dimm", "oom", "memory"}),
        ("software", {"software", "bug", "exception", "python", "code"}),
        ("scheduler", {"preempted", "preemption", "spot"}),
    ):
        if signs.intersection(words):
            return part
    return "unknown"
