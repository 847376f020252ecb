"""What planning costs: `ftckpt gc` of a root of many checkpoints of many files each.

    python benchmarks/retention.py [--checkpoints 200] [--files 2000] [--linked] [--rounds 3]

The checkpoints are real: torch saves one, and the others have its bytes. Twenty million files fit
on few machines, so the cost of one file more is measured, by a root of four checkpoints beside the
large one, and what ten thousand checkpoints of two thousand files cost is reckoned from it. With
`--linked` what goes is real in its names alone: the files of a checkpoint are one file (hard
links), twenty million names fit, and only what goes by names is measured. What is kept was checked
before, as it is in cron. Beside it stand one pass over the same names (`find`) and one that asks
for the size of each (`du`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import side_by_side
from side_by_side import Contestant, Row, compare, peak_memory, workplace

# What is asked for in one listing of ten thousand checkpoints.
LARGE = 10_000 * 2_000
FEW = 4
KEPT = 3
RULES = ("--keep-last", str(KEPT), "--max-delete", "100%")
SAVE = """
import sys
from pathlib import Path
from retention import save_files
save_files(Path(sys.argv[1]), int(sys.argv[2]))
"""


def main() -> None:
    parser = side_by_side.arguments(__doc__.splitlines()[0], rounds=3)
    parser.add_argument("--checkpoints", type=int, default=200)
    parser.add_argument("--files", type=int, default=2_000, help="of each checkpoint")
    parser.add_argument("--linked", action="store_true", help="few inodes; plans by names alone")
    options = parser.parse_args()
    with workplace(options.dir) as place:
        numbers = {"few": FEW, "many": options.checkpoints}
        make_roots(place, numbers, options.files, linked=options.linked)
        rows: dict[str, list[Row]] = {}
        for name in ("few", "many"):
            root = str(place / name)
            gc = ("gc", root, *RULES)
            contestants = [
                Contestant("ftckpt gc, by names", lambda g=gc: by_names(*g), ours=True),  # type: ignore[misc]
                Contestant("find, names", lambda r=root: silent("find", r)),  # type: ignore[misc]
            ]
            if not options.linked:
                contestants += [
                    Contestant("ftckpt gc --json, sizes too", lambda g=gc: sizes_too(*g)),  # type: ignore[misc]
                    Contestant("du, sizes", lambda r=root: silent("du", "-s", r)),  # type: ignore[misc]
                ]
            rows[name] = compare(contestants, options.rounds)
        files = (options.checkpoints - FEW) * options.files
        extra: dict[str, object] = {
            f"{many.name}, of {LARGE // 10**6} million files": reckoned(few, many, files)
            for few, many in zip(rows["few"], rows["many"], strict=True)
        }
        everything = [] if options.linked else ["--json"]
        extra["peak RSS, MiB"] = peak_memory(*side_by_side.ftckpt_command(), *gc, *everything)
    title = f"gc of {options.checkpoints} checkpoints of {options.files} files"
    side_by_side.show(title, rows["many"], extra, as_json=options.json)


def by_names(*words: str) -> int:
    """Plan as for a person who looks at a root of more files than are worth asking about."""
    code = (
        "from ftckpt.commands.cli import app; from ftckpt.commands import gc;"
        " gc._MOST_FILES = 0; app.main()"
    )
    return silent(sys.executable, "-c", code, *words)


def sizes_too(*words: str) -> int:
    """Plan as for a plan that is to be carried out."""
    return silent(*side_by_side.ftckpt_command(), *words, "--json")


def reckoned(few: Row, many: Row, files: int) -> str:
    """Return what one file more costs, and as many as `LARGE`."""
    each = (min(many.seconds) - min(few.seconds)) / files
    return f"{each * 1e6:.2f} us a file, {each * LARGE:.0f} s"


def make_roots(place: Path, numbers: dict[str, int], files: int, *, linked: bool) -> None:
    """Make roots of so many real checkpoints, an hour apart, those that are kept checked before."""
    one = place / "one"
    # In a process of its own: what a process starts inherits its peak memory.
    command = [sys.executable, "-c", SAVE, str(one), str(files)]
    subprocess.run(command, cwd=Path(__file__).parent, check=True)
    data = {path.name: path.read_bytes() for path in one.iterdir()}
    smallest = min(data, key=lambda name: len(data[name]))
    now = time.time()
    for root, number in numbers.items():
        for back in range(number):
            path = place / root / f"step-{(number - back) * 100}"
            path.mkdir(parents=True)
            written = [smallest] if linked and back >= KEPT else list(data)
            for name in written:
                (path / name).write_bytes(data[name])
                os.utime(path / name, (now - (back + 1) * 3600,) * 2)
            for name in data.keys() - set(written):
                os.link(path / smallest, path / name)
        check_kept(place / root)


def check_kept(root: Path) -> None:
    from ftckpt.discovery import resolve as opening
    from ftckpt.formats.catalog import FORMATS
    from ftckpt.retention.apply.prepare import prepare, remember
    from ftckpt.retention.policy import Policy
    from ftckpt.storage import StoreOptions

    found = opening.locate(str(root), StoreOptions())
    # What goes need not be listed for that.
    remember(prepare(found, FORMATS, Policy(keep_last=KEPT), time.time(), most_files=0))


def save_files(path: Path, files: int) -> None:
    """Let torch save a checkpoint of so many files: one a tensor, and the metadata."""
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    state = {f"layers.{i}.weight": torch.full((2,), float(i)) for i in range(files - 1)}
    writer = FileSystemWriter(path, single_file_per_rank=False, sync_files=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process saves is what is meant
        save({"model": state}, storage_writer=writer, no_dist=True)


def silent(*command: str) -> int:
    subprocess.run(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=side_by_side.ROOT,
        env=side_by_side.environment(),
        check=True,
    )
    return 0


if __name__ == "__main__":
    main()
