"""Which faults of meaning `verify --level values` sees in unsealed checkpoints of each format.

tests/data/golden/semantic_faults.txt has a line a case: what it is, and what is said of it. A line
that ends in `unseen` is a fault that nothing in the files contradicts (or that nobody looks for
yet): `seal` finds it, nothing else. A change of the table is a change of what can be trusted.

    python -m tests.faults.test_semantic    # writes the table anew
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftckpt.errors import ExitCode, FtckptError
from ftckpt.findings import Severity, from_error
from ftckpt.verification import Level, VerifyOptions, verify
from tests.builders.archives import extract
from tests.builders.checkpoints import open_checkpoint
from tests.builders.semantic_faults import Changes, faults_of

DATA = Path(__file__).parents[1] / "data"
TABLE = DATA / "golden" / "semantic_faults.txt"
SAMPLES = (
    "trainer_dirs/trainer",
    "trainer_dirs/trainer_peft",
    "trainer_dirs/trainer_zero2",
    "trainer_dirs/accelerate",
    "dcp/fsdp2/step-3",
    "dcp/tp/step-3",
    "deepspeed/z1/global_step2",
    "deepspeed/z3/global_step2",
    "deepspeed/pipe/global_step2",
    "megatron_dist/buckets_pp2vp2/iter_0000002",
    "ranks/fsdp1/actor",
    "by_hand/recorded",
    "orbax/files",
)
# Of the table's lines, how many a short run tries: one of this many.
SHARE = 12


def placed(sample: str, root: Path) -> Path:
    """Put a sample below a folder, without the truth beside it; return its place."""
    name, _, inside = sample.rpartition("/")
    archive = DATA / f"{name}.tar.xz"
    if archive.exists():
        extract(archive, root)
        return root / Path(name).name / inside
    return Path(shutil.copytree(DATA / sample, root / Path(sample).name))


def told(place: Path) -> tuple[ExitCode, set[str]]:
    """Return a code, and the kinds of its errors; where it is OK, of warnings."""
    try:
        report = verify(open_checkpoint(place), VerifyOptions(level=Level.VALUES))
        found, code = list(report.findings), report.code
    except FtckptError as error:
        found = [from_error(error)]
        code = found[0].code
    if code is not ExitCode.OK:
        return code, {f.kind for f in found if f.code == code}
    warned = (f for f in found if f.severity is Severity.WARNING or f.kind == "step-disagrees")
    return code, {f.kind for f in warned}


def damage(place: Path, changes: Changes) -> None:
    for name, data in changes.items():
        path = place / name
        if data is None:
            path.unlink()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    for folder in sorted((p for p in place.rglob("*") if p.is_dir()), reverse=True):
        if not any(folder.iterdir()):
            folder.rmdir()


def lines(sample: str, root: Path, only: frozenset[str] | None = None) -> Iterator[str]:
    """Yield the table's lines of a sample; `only` are the beginnings of those that are wanted."""
    intact = placed(sample, root / "intact")
    code, known = told(intact)
    assert code is ExitCode.OK, "an intact checkpoint is called damaged"
    place = root / "damaged" / intact.name
    saves = only is None or any("| file of " in begin for begin in only)
    for fault in faults_of(intact, saves=saves):
        begin = f"{sample} | {fault.what} | {fault.case} | "
        if only is not None and begin not in only:
            continue
        shutil.copytree(intact, place)
        damage(place, fault.changes())
        code, kinds = told(place)
        shown = " ".join(sorted(kinds if code else kinds - known))
        yield begin + (f"{code:d} {shown}" if code else f"told {shown}" if shown else "unseen")
        shutil.rmtree(place)


@pytest.mark.parametrize("sample", SAMPLES)
def test_what_is_seen_and_what_is_not(
    sample: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    table = [line for line in TABLE.read_text().splitlines() if line.startswith(f"{sample} | ")]
    assert table
    if pytestconfig.getoption("campaign") == "full":
        assert list(lines(sample, tmp_path)) == table
        return
    number = SAMPLES.index(sample)
    wanted = table[number % SHARE :: SHARE]
    begins = frozenset(line.rpartition(" | ")[0] + " | " for line in wanted)
    assert list(lines(sample, tmp_path, begins)) == wanted


# What copies, editors and systems leave in directories.
LEFT = (
    ".DS_Store", "Thumbs.db", ".lock", "README.md", "notes.txt", ".nfs0000000000000001",
    "events.out.tfevents.1.host", "slurm-12.out", ".git/HEAD", "lost+found/x", ".hydra/config.yaml",
    "wandb/run-1/x.json", "runs/events.out.tfevents.2",
)  # fmt: skip


@pytest.mark.parametrize("sample", SAMPLES)
def test_what_is_left_beside_changes_nothing(sample: str, tmp_path: Path) -> None:
    place = placed(sample, tmp_path)
    before = told(place)
    files = [p for p in sorted(place.rglob("*")) if p.is_file()]
    for path in files[:40]:
        cut = path.read_bytes()[: path.stat().st_size // 2]
        for name, data in (
            (f"._{path.name}", b"\0\5\x16\7" + bytes(100)),  # macOS
            (f".{path.name}.aB3xYz", cut),  # rsync
            (f".{path.name}.swp", b"b0VIM 8.2"),
            (f"{path.name}.1a2b3c4d.partial", cut),  # rclone
        ):
            (path.parent / name).write_bytes(data)
    for name in LEFT:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(b"x")
    assert told(place) == before


if __name__ == "__main__":
    import sys

    made = []
    for one in sys.argv[1:] or SAMPLES:
        with tempfile.TemporaryDirectory() as folder:
            made += list(lines(one, Path(folder)))
    TABLE.write_text("\n".join(made) + "\n")
