"""Reshard and convert against `cp -r` of the same bytes and against the frameworks' own tools.

    python benchmarks/reshard.py [CASE …] [--size 2GB] [--rounds 3] [--peer-python PATH] [--json]

Every case makes its own data and runs its contestants in turn, the page cache warm. Ours ends with
the result flushed to the disk, `cp` does not, so `cp -r` and then `sync` is shown beside it. The
frameworks' tools run under `--peer-python`, an interpreter that has them (transformers, deepspeed);
those of torch run under this one. Memory is the peak of one run of the whole command.
"""

from __future__ import annotations

import multiprocessing
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import side_by_side
from reshard_data import save_dcp_with_optimizer, save_hugging_face, save_megatron
from side_by_side import Contestant, compare, ftckpt_command, peak_memory, warm, workplace

from ftckpt.formats.catalog import FORMATS
from ftckpt.formats.same_object import SameObject
from ftckpt.formats.writers import WRITERS
from ftckpt.limits import jobs, parse_bytes
from ftckpt.opening import open_target
from ftckpt.stores import StoreOptions
from ftckpt.transfer.carrying import TransferOptions, transfer
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import Wishes


@dataclass(frozen=True)
class Case:
    """One thing to do.

    Attributes:
        title: of the table.
        make: writes the source of about so many bytes into a directory, and returns its path.
        words: of the command line, with {source} and {out}.
        to: the target's format.
        wishes: the same as `words`, for the call in this process.
        peer: name of the other tool and its command line ({peer} is the interpreter that has it).
    """

    title: str
    make: Callable[[Path, int], Path]
    words: Sequence[str]
    to: str
    wishes: Wishes
    peer: tuple[str, Sequence[str]] | None = None


def _megatron(tp: int) -> Callable[[Path, int], Path]:
    return lambda place, nbytes: save_megatron(place, nbytes, tp=tp)


def _zero(place: Path, nbytes: int) -> Path:
    source = save_dcp_with_optimizer(place / "dcp", nbytes)
    out = place / "global_step1"
    words = ("convert", str(source), str(out), "--to", "deepspeed", "--dp", "4")
    side_by_side.run_ftckpt(*words, "--zero-stage", "2", "--no-proof")
    shutil.rmtree(source)
    return out


DCP_TO_TORCH = (
    "import sys; from torch.distributed.checkpoint.format_utils import dcp_to_torch_save as f; "
    "f(sys.argv[1], sys.argv[2])"
)
SAVE_PRETRAINED = (
    "import sys; from transformers import AutoModelForCausalLM as M; "
    "M.from_pretrained(sys.argv[1], dtype='auto')"
    ".save_pretrained(sys.argv[2], max_shard_size='500MB')"
)
ZERO_TO_FP32 = (
    "import sys; from deepspeed.utils.zero_to_fp32 import "
    "convert_zero_checkpoint_to_fp32_state_dict as f; from pathlib import Path; "
    "p = Path(sys.argv[1]); f(str(p.parent), sys.argv[2], tag=p.name)"
)

RESHARD = ("reshard", "{source}", "{out}")
CASES = {
    "tp8-tp4": Case(
        "Megatron with optimizer, TP 8 to 4", _megatron(8), (*RESHARD, "--tp", "4"), "megatron",
        Wishes(tp=4),
    ),
    "tp4-tp8": Case(
        "Megatron with optimizer, TP 4 to 8", _megatron(4), (*RESHARD, "--tp", "8"), "megatron",
        Wishes(tp=8),
    ),
    "tp8-tp1": Case(
        "Megatron with optimizer, TP 8 to 1", _megatron(8), (*RESHARD, "--tp", "1"), "megatron",
        Wishes(tp=1),
    ),
    "dcp-safetensors": Case(
        "DCP with optimizer to safetensors",
        lambda place, nbytes: save_dcp_with_optimizer(place / "step-1", nbytes),
        ("convert", "{source}", "{out}", "--to", "safetensors"),
        "safetensors",
        Wishes(),
        ("dcp_to_torch_save", (sys.executable, "-c", DCP_TO_TORCH, "{source}", "{out}")),
    ),
    "hf-shards": Case(
        "Hugging Face shards of another size",
        lambda place, nbytes: save_hugging_face(place / "model", nbytes),
        (*RESHARD, "--max-shard-size", "500MB"),
        "safetensors",
        Wishes(max_shard_size=500_000_000),
        ("from_pretrained, save_pretrained",
         ("{peer}", "-c", SAVE_PRETRAINED, "{source}", "{out}")),
    ),
    "zero2-dp4-dp2": Case(
        "DeepSpeed ZeRO-2, dp 4 to 2", _zero, (*RESHARD, "--dp", "2"), "deepspeed", Wishes(dp=2),
        ("zero_to_fp32.py (drops the optimizer)",
         ("{peer}", "-c", ZERO_TO_FP32, "{source}", "{out}")),
    ),
}  # fmt: skip


def main() -> None:
    parser = side_by_side.arguments(__doc__.splitlines()[0], size="2GB", rounds=3)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--peer-python", help="an interpreter that has the frameworks' tools")
    parser.add_argument("--device", default="cpu", help="also run ours with --device DEVICE")
    options = parser.parse_args()
    for name in options.cases or CASES:
        with workplace(options.dir) as place:
            _run(name, place, options)


def _make(name: str, place: Path, nbytes: int) -> None:
    (place / "source").write_text(str(CASES[name].make(place, nbytes)))


def _run(name: str, place: Path, options: object) -> None:
    case, get = CASES[name], vars(options)
    # Made by a process of its own: what it held would count as the memory of those that follow.
    maker = multiprocessing.get_context("spawn").Process(
        target=_make, args=(name, place, parse_bytes(get["size"]))
    )
    maker.start()
    maker.join()
    source = Path((place / "source").read_text())
    out = place / "out"
    size = sum(f.stat().st_size for f in source.rglob("*") if f.is_file())

    def filled(words: Sequence[str]) -> list[str]:
        peer = get["peer_python"] or sys.executable
        return [w.format(source=source, out=out, peer=peer) for w in words]

    def clean() -> None:
        if out.is_dir():
            shutil.rmtree(out)
        out.unlink(missing_ok=True)

    def run(command: Sequence[str]) -> int:
        subprocess.run(command, check=True, capture_output=True, env=side_by_side.environment())
        return size

    def ours(*, proof: bool = True, device: str = "cpu") -> int:
        options = TransferOptions(jobs=jobs(), proof=proof, device=device)
        return _transfer(case, source, out, options, size)

    warm(source)
    contestants = [
        Contestant("ftckpt, in a process", ours, ours=True),
        Contestant("ftckpt, without the proof", lambda: ours(proof=False)),
        Contestant("ftckpt, the command", lambda: run([*ftckpt_command(), *filled(case.words)])),
        Contestant("cp -r", lambda: run(["cp", "-r", str(source), str(out)])),
        Contestant("cp -r, then sync", lambda: run(["sh", "-c", f"cp -r {source} {out}; sync"])),
    ]
    if get["device"] != "cpu":
        contestants.append(
            Contestant(f"ftckpt, {get['device']}", lambda: ours(device=get["device"]))
        )
    extra: dict[str, object] = {"bytes of the source": size}
    command = [*ftckpt_command(), *filled(case.words)]
    extra["peak memory of the command, MiB"] = peak_memory(*command)
    clean()
    if case.peer is not None and ("{peer}" not in case.peer[1] or get["peer_python"]):
        other = filled(case.peer[1])
        contestants.append(Contestant(case.peer[0], lambda: run(other)))
        extra["peak memory of the peer, MiB"] = peak_memory(*other)
        clean()
    rows = compare([replace(c, prepare=clean) for c in contestants], get["rounds"])
    side_by_side.show(case.title, rows, extra, as_json=get["json"])


def _transfer(case: Case, source: Path, out: Path, options: TransferOptions, size: int) -> int:
    checkpoint = open_target(str(source), FORMATS, StoreOptions()).open()
    content = Content.of(checkpoint)
    writer = next(w for w in WRITERS if w.name == case.to)
    transfer(
        content,
        writer.layout(content, case.wishes),
        str(out),
        next(f for f in FORMATS if f.name == case.to),
        single=writer.single,
        same_objects=SameObject,
        options=options,
        store_options=StoreOptions(),
    )
    return size


if __name__ == "__main__":
    main()
