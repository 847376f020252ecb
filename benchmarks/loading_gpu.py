"""Loading onto a GPU: one run of ten minutes that fills the table of docs/benchmarks.md.

    python benchmarks/loading_gpu.py [--size 8GB] [--rounds 3] [--json] [--dir /dev/shm]

Contestants, in turn, from cached files onto one GPU: Reader checked and unchecked, `dcp.load` with
torch's FileSystemReader, `ftckpt.load(device="cuda")` of the same weights as safetensors,
`safetensors.torch.load_file(device="cuda")`, fastsafetensors where it is installed, and `reshard`
and then `dcp.load`. Beside them the ceiling: page-locked memory copied up in pieces of the size
that Reader uses. First everything is loaded on the CPU too, and every bit is compared; a cast to
bfloat16 and a tensor with other strides are among it.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import side_by_side
from dcp_data import save_dcp
from loading import empty_state, load
from side_by_side import Contestant, compare, remove, warm, workplace

from ftckpt.amounts import size as size_in_bytes


def main() -> None:
    parser = side_by_side.arguments((__doc__ or "").splitlines()[0], size="8GB", rounds=3)
    parser.add_argument("--jobs", type=int, default=4, help="threads of Reader")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU here")
    with workplace(options.dir) as place:
        path, folder = place / "step-1", place / "model"
        save_dcp(path, size_in_bytes(options.size), tensor=32 << 20)
        save_safetensors(path, folder)
        warm(path)
        warm(folder)
        identical(path, options.jobs)
        rows = compare(contestants(path, folder, options.jobs), options.rounds)
        ceiling = next(row for row in rows if row.name.startswith("page-locked"))
        ours = next(row for row in rows if row.name == "Reader, checked")
        extra = {
            "device": torch.cuda.get_device_name(),
            "of the ceiling": round(ours.rate / ceiling.rate, 2),
            "device memory beside the tensors, MiB": staging(path, options.jobs),
            "bits": "equal to the CPU's, cast and strided too",
        }
        side_by_side.show("load onto a GPU, warm", rows, extra, as_json=options.json)


def on_gpu(path: Path) -> dict[str, Any]:
    return {name: one.to("cuda") for name, one in empty_state(path).items()}


def save_safetensors(path: Path, folder: Path) -> None:
    """Save the same weights as a Hugging Face folder."""
    import ftckpt

    ftckpt.convert(str(path), str(folder), "safetensors", only="model", no_proof=True)


def identical(path: Path, jobs: int) -> None:
    """Require that the GPU gets the bits that the CPU gets: as stored, cast, and strided."""
    import torch

    from ftckpt.torch import Reader

    here = empty_state(path)
    there = on_gpu(path)
    for number, name in enumerate(sorted(here)):
        if number % 5 == 1:
            here[name], there[name] = here[name].bfloat16(), there[name].bfloat16()
        if number % 5 == 2:
            here[name] = torch.zeros(2, *here[name].shape)[0]
            there[name] = torch.zeros(*there[name].shape, 2, device="cuda")[..., 0]
    load(here, Reader(path, jobs=jobs))
    load(there, Reader(path, jobs=jobs))
    for name, one in here.items():
        assert torch.equal(one, there[name].cpu()), name


def staging(path: Path, jobs: int) -> float:
    """Return how much memory of the device a load takes beside the tensors, in MiB."""
    import torch

    from ftckpt.torch import Reader

    state = on_gpu(path)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    load(state, Reader(path, jobs=jobs))
    return round((torch.cuda.max_memory_allocated() - held) / (1 << 20), 1)


def contestants(path: Path, folder: Path, jobs: int) -> list[Contestant]:
    import torch
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    import ftckpt
    from ftckpt.loading.tensors import STAGE
    from ftckpt.torch import Reader

    state = on_gpu(path)
    nbytes = sum(one.numel() * one.element_size() for one in state.values())
    out = path.parent / "for-2-ranks"
    files = sorted(folder.glob("*.safetensors"))
    locked = torch.empty(STAGE, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(STAGE, dtype=torch.uint8, device="cuda")

    def synchronised(nbytes: int) -> int:
        torch.cuda.synchronize()
        return nbytes

    def ceiling() -> int:
        for _ in range(nbytes // STAGE):
            device.copy_(locked, non_blocking=True)
        return synchronised(nbytes // STAGE * STAGE)

    def whole_files() -> int:
        for file in files:
            load_file(file, device="cuda")
        return synchronised(nbytes)

    def in_memory() -> int:
        ftckpt.load(str(folder), device="cuda", jobs=jobs)
        return synchronised(nbytes)

    def resharded() -> int:
        ftckpt.reshard(str(path), str(out), dp=2)
        return synchronised(load(state, FileSystemReader(out)))

    found = [
        Contestant("Reader, checked", lambda: synchronised(load(state, Reader(path, jobs=jobs))),
                   ours=True),
        Contestant("Reader, unchecked", lambda: synchronised(
            load(state, Reader(path, jobs=jobs, level="structure")))),
        Contestant("dcp.load, FileSystemReader",
                   lambda: synchronised(load(state, FileSystemReader(path)))),
        Contestant("ftckpt.load of safetensors", in_memory),
        Contestant("safetensors load_file", whole_files),
        Contestant("reshard, then dcp.load", resharded, prepare=lambda: remove(out, path)),
        Contestant(f"page-locked copies of {STAGE >> 20} MiB", ceiling),
    ]  # fmt: skip
    try:
        from fastsafetensors import fastsafe_open  # type: ignore[import-not-found]
    except ImportError:
        print("fastsafetensors is not installed: left out")
        return found

    def fast() -> int:
        with fastsafe_open(filenames=list(map(str, files)), nogds=True, device="cuda:0") as opened:
            for name in opened.keys():  # noqa: SIM118 (its own mapping)
                opened.get_tensor(name).clone()
        return synchronised(nbytes)

    return [*found, Contestant("fastsafetensors", fast)]


if __name__ == "__main__":
    main()
