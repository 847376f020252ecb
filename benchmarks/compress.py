"""Compress a checkpoint as a whole: `delta pack` without a base, beside ZipNN and zstd as commands.

    python benchmarks/compress.py [--size 1GB] [--rounds 2] [--json] [--zipnn PYTHON]

The weights are bfloat16 and drawn from a normal distribution, as trained ones nearly are. ZipNN's
wheel installs no command: its class is called for one file after the other, as its own script
zipnn_compress_file.py does, with as many threads as ours has workers. `--zipnn` names a Python that
has it; without it the Python that runs this is tried. All read files and write files; ours alone
reads its result back and compares every tensor.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import side_by_side
from reshard_data import save_hugging_face
from side_by_side import Contestant, compare, ftckpt_command, remove, warm, workplace

from ftckpt.amounts import size as size_in_bytes
from ftckpt.workers.limits import jobs

_ZIPNN = """
import sys
from pathlib import Path
from zipnn import ZipNN
source, out, threads = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
out.mkdir()
for file in sorted(source.glob("*.safetensors")):
    coder = ZipNN(bytearray_dtype="bfloat16", threads=threads)
    (out / (file.name + ".znn")).write_bytes(coder.compress(bytearray(file.read_bytes())))
"""


def main() -> None:
    parser = side_by_side.arguments(__doc__.splitlines()[0], size="1GB", rounds=2)
    parser.add_argument("--zipnn", default=sys.executable, help="a Python interpreter that has it")
    options = parser.parse_args()
    with workplace(options.dir) as place:
        source, out = save_hugging_face(place / "model", size_in_bytes(options.size)), place / "out"
        size = below(source)
        ours = (*ftckpt_command(), "delta", "pack", str(source), str(out))
        commands = {"ftckpt delta pack, whole, proven": ours}
        absent = []
        if has_zipnn(options.zipnn):
            words = (options.zipnn, "-c", _ZIPNN, str(source), str(out), str(jobs()))
            commands["zipnn, file by file"] = words
        else:
            absent.append("zipnn is not installed (pip install zipnn; --zipnn PYTHON)")
        if shutil.which("zstd"):
            # zstd writes beside the data unless it is told one file: a folder keeps them apart.
            line = f"mkdir {out}; zstd -q -3 -T{jobs()} --output-dir-flat {out} {source}/*"
            commands["zstd -3"] = ("sh", "-c", line)
        else:
            absent.append("zstd is not installed")
        warm(source)
        smaller: dict[str, float] = {}

        def run(name: str, command: tuple[str, ...]) -> int:
            subprocess.run(
                command, check=True, capture_output=True, cwd=side_by_side.ROOT,
                env=side_by_side.environment(),
            )  # fmt: skip
            smaller[name] = round(size / below(out), 3)
            return size

        rows = compare(
            [
                Contestant(
                    name,
                    partial(run, name, command),
                    ours=command is ours,
                    prepare=partial(remove, out, source),
                )
                for name, command in commands.items()
            ],
            options.rounds,
        )
        extra: dict[str, object] = {f"{name}: times smaller": s for name, s in smaller.items()}
        if absent:
            extra["left out"] = "; ".join(absent)
        side_by_side.show("compress a whole model in bfloat16", rows, extra, as_json=options.json)


def has_zipnn(python: str) -> bool:
    found = subprocess.run([python, "-c", "import zipnn"], capture_output=True, check=False)
    return not found.returncode


def below(path: Path) -> int:
    files = [path] if path.is_file() else path.rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file())


if __name__ == "__main__":
    main()
