"""What a command costs before it has work to do: processor time, on checkpoints of a few tensors.

python benchmarks/startup.py [--rounds 20] [--json]

Elapsed time would say what else the machine does; importing keeps one core busy.
"""

from __future__ import annotations

from pathlib import Path

import side_by_side
from side_by_side import ROOT, Row, ftckpt_command, used_by, workplace

VERBS = ("inspect", "verify", "seal", "latest", "demo")
DATA = ROOT / "tests" / "data"
PLACES = {
    "DCP": DATA / "run" / "step-1",
    "DeepSpeed": DATA / "deepspeed" / "z1" / "global_step2",
    "one file a rank": DATA / "ranks" / "fsdp1" / "actor",
    "a delta": DATA / "delta",
}


def main() -> None:
    options = side_by_side.arguments(__doc__.splitlines()[0], rounds=20).parse_args()
    with workplace(options.dir) as folder:
        commands: dict[str, tuple[str, ...]] = {"--help": ("--help",), "--version": ("--version",)}
        commands |= {f"{verb} --help": (verb, "--help") for verb in VERBS}
        places = {"safetensors": weights(folder)} | PLACES
        commands |= {f"inspect {name}": ("inspect", str(path)) for name, path in places.items()}
        commands["verify safetensors"] = ("verify", str(places["safetensors"]))
        commands["verify DCP"] = ("verify", str(places["DCP"]))
        root = str(DATA / "run")
        commands["latest, a root of two"] = ("latest", root)
        commands["gc, a root of two"] = ("gc", root, "--keep-last", "2")
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for number in range(options.rounds + 1):
            for name, words in commands.items():
                spent = processor_time(*words)
                if number:  # the first round compiles modules and warms the page cache
                    seconds[name].append(spent)
    base = seconds["--help"]
    rows = [
        Row(name, times, 0, [time / least for time, least in zip(times, base, strict=True)])
        for name, times in seconds.items()
    ]
    side_by_side.show("start-up, processor time", rows, {}, as_json=options.json)


def weights(folder: Path) -> Path:
    """Make a folder of weights and return it."""
    header = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    data = len(header).to_bytes(8, "little") + header + bytes(4)
    (folder / "model.safetensors").write_bytes(data)
    return folder


def processor_time(*words: str) -> float:
    """Run the command line and return the seconds that it kept processors busy."""
    used = used_by(*ftckpt_command(), *words)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
