"""Every command that a page shows is run, on small samples that its names stand for.

The pages of tasks and frameworks are run whole, as pasted, by `test_site.py`, and the scripts in
docs/jobs by `test_jobs.py`. Here is the rest: their other blocks, and what stands in prose.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from ftckpt.commands.cli import verbs
from tests.builders.documented_samples import Samples
from tests.documented import PAGES, SHELLS, Scene, scenes
from tests.servers.s3 import BUCKET, S3Service, upload_tree
from tests.workers import forked

# Pages of which `test_site.py` pastes all blocks of `sh` into one shell.
PASTED = ("docs/tasks/", "docs/frameworks/")

# What is not run here, and why not.
NOT_RUN = {
    "convert /ckpt/step-9000 /work/hf --to safetensors --cluster tcp://head:8786":
        "needs a scheduler of Dask: tests/parts/test_cluster.py",
    "replay run --at 20 --steps 30 --timeout 10m --dir replay --html replay.html -- torchrun "
    "--nproc-per-node 2 train.py --tiny --ckpt '{checkpoint}' --steps '{steps}'":
        "torchrun starts a training of two ranks: tests/replay/test_ranks.py",
    "replay": "the name of three verbs",
    **dict.fromkeys(
        (
            "seal model/ --sign --private-key lab.pem",
            "verify model/ --signature --public-key lab.pub",
            "seal model/ --sign --private-key k.pem --signing-certificate k.crt"
            " --certificate-chain intermediate.crt",
            "verify model/ --signature --certificate-chain root.crt",
        ),
        "needs keys that openssl makes: tests/manifest/test_signature.py",
    ),
    "status ROOT --watch 10s": "looks again until Ctrl-C: tests/commands/test_status.py",
}  # fmt: skip

# Words that stand for something, and what is said in their place.
WORDS = {
    "N": "2", "STEP": "1000", "TEXT": "why", "FORMAT": "dcp", "VERB": "copy", "OPTIONS": "",
    "RULES": "--keep-last 2", "COMMAND": "true", "srun": "true", "torchrun": "true",
    "LOG…": "job.log", "$WORLD": "1", "kern-n*.log.gz": "kern-n1.log.gz kern-n2.log.gz",
    "s3://…": "s3://bucket/run7",
}  # fmt: skip

# What a verb needs, where prose names it without.
NEEDS = {
    "convert": "SRC DST", "copy": "SRC DST", "delta pack": "A B OUT", "diff": "A B",
    "gc": "ROOT", "guard": "ROOT -- true", "incidents": "job.log", "inspect": "CKPT",
    "latest": "ROOT", "plan": "--mtbf 3h --save 60s",
    "plan elastic": "--from 8 --to 6 --batch 64 --lr 3e-4", "promote": "CKPT",
    "repair": "BAD --from CKPT", "replay run": "-- python train.py", "reshard": "SRC DST",
    "restart": "ROOT --world 1 --scratch tmp", "scrub": "ROOT", "seal": "CKPT", "status": "ROOT",
    "sync": "ROOT DST", "verify": "CKPT",
}  # fmt: skip

# The same for an option at the end.
VALUES = {
    "--require": "model", "--reason": "why", "--free": "1kB", "--manifest": "m.json", "--dp": "1",
    "--series": "G",
    "--from-log": "job.log", "--drop": "exp_avg*", "--also": "OTHER_NODE/SESSION",
}  # fmt: skip

# Commands in prose that need more, or something else.
WHOLE = {
    "cat CKPT": "cat CKPT lm_head.weight",
    "convert --adapter": "convert BASE merged --to safetensors --adapter adapter",
    "convert --names": "convert TITAN hf --to safetensors --names hf --only model "
    "--config config.json",
    "convert --names hf": "convert TITAN hf --to safetensors --names hf --only model "
    "--config config.json",
    "convert --only adapter": "convert TRAINING OUT --to safetensors --only adapter "
    "--beside adapter",
    "convert --rename": "convert SRC DST --to safetensors --rename names.toml",
    "convert --to torch-checkpointing": "convert TITAN OUT --to torch-checkpointing",
    "convert --to megatron-dist": "convert hf OUT --to megatron-dist --names megatron",
    "convert --to megatron-fsdp": "convert START OUT --to megatron-fsdp",
    "convert --to safetensors --names hf --only model":
        "convert START OUT --to safetensors --names hf --only model",
    "convert DELTA DST --to FORMAT --only model":
        "convert DELTA/step-9000 DST --to FORMAT --only model",
    "pin ROOT": "pin ROOT STEP",
    "plan sweep --over gpus=1k..128k": "plan sweep --over gpus=1k..128k --gpu-mtbf 50000h "
    "--save 60s",
    "repair PATH": "repair COPIES",
    "reshard --like": "reshard ZERO OUT --like ZERO",
    "reshard --tp N": "reshard RANKS OUT --tp N",
    "reshard SRC DST": "reshard SRC DST --dp 2",
    "reshard checkpoint-2/global_step2": "reshard checkpoint-2/global_step2 OUT --dp 2",
    "seal --force PATH": "seal PATH --force",
    "seal --integrity": "seal START --integrity",
    "seal PATH --integrity": "seal START --integrity",
    "status --parts PLACE": "status --parts PLACE",
    "tag ROOT": "tag ROOT STEP best",
    "tag ROOT STEP": "tag ROOT STEP best",
    "pin ROOT --remove": "pin ROOT STEP --remove",
    "pin --remove": "pin ROOT STEP --remove",
    "tag --remove": "tag ROOT STEP best --remove",
    "tag ROOT --remove": "tag ROOT STEP best --remove",
}  # fmt: skip

# What was done before a command, and the file that a shell wrote of its output.
BEFORE = {
    "diff SRC DST --rules mine.toml": ("reshard SRC DST --tp 4 --rules mine.toml", ""),
    "gc ROOT plan.json": ("gc ROOT RULES --json", "plan.json"),
    "gc ROOT plan.json --apply": ("gc ROOT RULES --json", "plan.json"),
    "latest ROOT --pointer last-known-good": ("promote ROOT@latest", ""),
    "status /ckpt/run7 --expect-interval 22m": ("verify /ckpt/run7@29000 --remember", ""),
    "status ROOT --scrub-every 30d": ("scrub ROOT", ""),
    "status --parts PLACE": ("verify CKPT --part 0/2 --parts PLACE", ""),
    "pin ROOT --remove": ("pin ROOT STEP", ""),
    "pin --remove": ("pin ROOT STEP", ""),
    "tag --remove": ("tag ROOT STEP best", ""),
    "tag ROOT --remove": ("tag ROOT STEP best", ""),
}

# Which sample lies where a page says. The first is for all pages; of the others, each whose
# pattern is found in `PAGE: COMMANDS` has its say.
PLACES: list[tuple[str, dict[str, str]]] = [
    ("", {
        "/ckpt/run7": "root", "/ckpt/step-9000": "root/step-9000", "/nvme/run7": "root",
        "$ROOT": "root", "ROOT": "root", "PATH": "root/step-9000", "CKPT": "root/step-9000",
        "CHECKPOINT": "root/step-9000", "SRC": "root/step-9000", "A": "root/step-8000",
        "B": "root/step-9000", "NEXT": "root/step-9000", "run": "root", "DELTA": "delta",
        "L1": "root", "L2": "root", "L3": "root", "BAD": "damaged-step", "TITAN": "titan",
        "START": "megatron/megatron-dist/iter_0000000", "RANKS": "meta", "ZERO": "zero2",
        "COPIES": "own-copies/copies/step-3", "TRAINING": "lora/training", "BASE": "lora/base",
        "config.json": "titan-config",
        "train.py": "train-py", "names.toml": "names-toml", "job.log": "month/job.log",
        "SESSION": "nvrx/node0/run7", "OTHER_NODE/SESSION": "nvrx/node1/run7",
        "checkpoint-2/global_step2": "zero2", "deepseek": "fp8", "tier2": "root",
        "gpt-oss-bf16": "gpt-oss-bf16",
        "ds/global_step0": "zero2", "s3://run7/ckpt/step-1000": "root/step-1000",
    }),
    ("latest .*--series", {"ROOT": "pairs", "runs/gan": "pairs"}),
    ("convert hf/ |convert --to megatron", {"hf": "llama"}),
    ("convert model ", {"model": "bf16"}),
    ("(convert base|verify adapter|only adapter --beside|convert --(only )?adapter)",
     {"adapter": "lora/adapter"}),
    ("convert base ", {"base": "lora/base"}),
    ("copy.md: repair", {"/ckpt/step-1000": "damaged-step",
                         "s3://run7/ckpt/step-1000": "sealed-root/step-9000"}),
    ("copy.md: copy /nvme", {"/shared": "folder"}),
    ("copy.md: copy /n0", {"/n0/step-9": "nodes/n0", "/n1/step-9": "nodes/n1"}),
    ("convert.md: .*run/step-1000 adapter-1000", {"run/step-1000": "lora/training"}),
    ("convert.md: .*run/iter_0001000 adapter", {
        "run/iter_0001000": "bridge/lora/iter_0000001", "base": "bridge/base/hf", "adapter": ""}),
    ("convert.md: .*run/1000", {
        "run/1000": "maxtext", "config.json": "maxtext-config", "run31/1000": "maxtext31",
        "config31.json": "maxtext31-config"}),
    ("convert.md: .*run/step-1000 hf .* hf start/step-0", {"run/step-1000": "titan"}),
    ("convert.md: convert llama hf", {"llama": "meta", "config.json": "llama/config.json"}),
    ("convert.md: .* hf bridge", {
        "run/step-1000": "tower/packed", "config.json": "tower/config.json"}),
    ("convert.md: convert run/iter_0001000 hf", {
        "run/iter_0001000": "megatron/megatron-dist/iter_0000000",
        "config.json": "llama/config.json"}),
    ("convert.md: .* --like ds", {"run/step-1000": "zero2-dcp"}),
    ("families.md", {
        "run/step-3": "families/step-3", "config.json": "families/config.json",
        "mine.toml": "families/mine.toml"}),
    ("fp8-and-back.md: convert run/step-3000", {
        "run/step-3000": "fp32-state", "deepseek-bf16": "bf16"}),
    ("formats.md: (copy|latest) DIR", {"DIR": "stepped-ranks"}),
    ("fsdp2.md: inspect", {"run/step-3": "titan"}),
    ("incidents.md", {
        "slurm-42.out": "month/job.log", "kern-n1.log.gz": "month/kern-n1.log.gz",
        "kern-n2.log.gz": "month/kern-n2.log.gz", "sacct.txt": "month/sacct.txt"}),
    ("promote.md: promote /ckpt", {"/ckpt/run7": "promoted-root"}),
    ("delta.md: delta pack", {"run/step-1010": "root/step-7000", "deltas": "chain"}),
    ("replay audit", {"CHECKPOINT": "root/step-8000"}),
    ("replay compare", {
        "A": "replay-logs/A", "B": "replay-logs/B", "U": "replay-logs/U"}),
    ("retention.md: gc .* --keep-last 2 --keep-every 1000$", {"/ckpt/run7": "rotated-root"}),
    ("retention.md: gc .* --thin-after 30d", {"/ckpt/run7": "old-root"}),
    ("rules.md", {"SRC": "ruled/ranks", "mine.toml": "ruled/mine.toml"}),
    ("status.md: status /ckpt/run7", {"/ckpt/run7": "slower-root"}),
    ("storage.md: copy hot", {
        "hot": "root", ".config/ftckpt/config.toml": "remotes-toml"}),
    ("config.md", {".config/ftckpt/config.toml": "config-toml"}),
    (": sync", {"DST": "folder"}),
    (": (verify|status) .*DST", {"DST": "root"}),
    ("sync.md: sync /nvme", {"/nvme/run7": "longer-root", "s3://bucket/run7": "shipped-root"}),
    ("tiers.md: latest /nvme", {
        "/nvme/run7": "damaged-root", "/shared/run7": "root", "s3://run7/ckpt": "root"}),
    ("verify.md: verify /mnt", {
        "/mnt/node0/step-9": "nodes/node0", "/mnt/node1/step-9": "nodes/node1",
        "/mnt/node2/step-9": "nodes/node2", "/mnt/node0/run": "nodes/run-n0",
        "/mnt/node1/run": "nodes/run-n1"}),
    ("crontab", {"$TIER": "folder"}),
    ("tiers.sbatch", {"$TIER": "root"}),
]  # fmt: skip

# Pages whose answers of this machine's and of a month's logs no sample gives.
OTHER_ANSWERS = ("docs/doctor.md", "docs/incidents.md")

# Where a command ends with another code than 0, as its page says.
CODES = {
    "diff A B": 3,
    "promote /ckpt/run7/step-7000": 8,
    "doctor s3://bucket/run7": 0,  # 14 by a lifecycle rule, which the service here does not have
}


_NUMBERS = itertools.count()
_ABSOLUTE = re.compile(r"/(ckpt|nvme|shared|mnt|n0|n1|work|var)/")


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Samples:
    return Samples(tmp_path_factory.mktemp("samples"))


class Stage:
    """A folder, and a prefix of a bucket, in which the names of a page mean something."""

    def __init__(self, folder: Path, samples: Samples, scene: Scene) -> None:
        self.folder, self.samples = folder, samples
        self.s3 = f"s3://{BUCKET}/documented-{next(_NUMBERS)}"
        said = [of for pattern, of in PLACES if re.search(pattern, told_of(scene))]
        self.places = {place: name for of in said for place, name in of.items()}
        self.laid: set[str] = set()
        folder.mkdir()
        for place in self.places:
            if place.startswith("."):
                self.lay(place)

    def words(self, words: Sequence[str]) -> list[str]:
        """Return what is said for the words of a command, and lay what they name."""
        found: list[str] = []
        for word in words:
            if word in WORDS:
                found += self.words(shlex.split(WORDS[word]))
                continue
            option, equals, value = word.rpartition("=")
            for place in sorted(self.places, key=len, reverse=True):
                if self.places[place] and re.match(rf"{re.escape(place)}($|[/@:])", value):
                    self.lay(place)
                    break
            found.append(option + equals + self.said(value))
        return found

    def said(self, path: str) -> str:
        if path.startswith("s3://"):
            return f"{self.s3}/{path.removeprefix('s3://')}"
        path = path.replace("$", "")
        return f"{self.folder}{path}" if _ABSOLUTE.match(path) else path

    def lay(self, place: str) -> None:
        if place in self.laid:
            return
        self.laid.add(place)
        where = self.said(place)
        if where.startswith("s3://"):
            upload_tree(self.samples[self.places[place]], where)
        else:
            self.samples.copy(self.places[place], self.folder / where)
        if where.endswith("config.toml"):
            settings = self.folder / where
            said = settings.read_text().replace("{folder}", str(self.folder))
            settings.write_text(said.replace("{s3}", self.s3))

    def run(self, words: Sequence[str], environment: Mapping[str, str]) -> CompletedProcess[str]:
        return forked.run(self.words(words), environment, self.folder)

    def shown(self, text: str) -> str:
        """Return an answer as a page would show it: without numbers, in its own places."""
        text = text.replace(f"{self.s3}/", "s3://").replace(f"{self.folder}/.", "/home/me/.")
        text = text.replace(str(self.folder), "")
        return without_numbers(text)


def without_numbers(text: str) -> str:
    text = re.sub(r"__\d+_\d+\.distcp|/data/\d+", "FILE", text)
    text = re.sub(r"\d{8}T\d{6}Z|(?<=bytes )\d+-\d+|\b[0-9a-f]{8}\b", "#", text)
    text = re.sub(r"(?<![\w-])\d[\d.,:/]*( ?([KMGT]i?B|B|min|ms|[smhd])\b| ?%)?(/s)?", "#", text)
    return re.sub(r"#( #)+", "#", re.sub(r"-{2,}", "--", re.sub(r" +", " ", text)))


def words_of(scene: Scene, line: str) -> list[str]:
    """Return the words of a command with all that prose leaves out."""
    if scene.language:
        return shlex.split(line)
    if line in WHOLE:
        return shlex.split(WHOLE[line])
    longest = sorted(verbs.VERBS, key=len, reverse=True)
    verb = next(one for one in longest if f"{line} ".startswith(f"{one} "))
    rest = shlex.split(line.removeprefix(verb))
    if (not rest or rest[0].startswith("-")) and verb in NEEDS:
        rest = [*shlex.split(NEEDS[verb]), *rest]
    if rest and rest[-1] in VALUES:
        rest.append(VALUES[rest[-1]])
    if verb == "gc" and not {"RULES", "plan.json"} & set(rest):
        rest.append("--keep-last=2")
    return [*verb.split(), *rest]


def told_of(scene: Scene) -> str:
    return f"{scene.page}: {'; '.join(one.line for one in scene.commands)}"


SCENES = [
    scene
    for page in PAGES
    for scene in scenes(page)
    if not (scene.language == "sh" and scene.page.startswith(PASTED))
]


def name_of(scene: Scene) -> str:
    first = " ".join(scene.commands[0].words[:2])
    return f"{scene.page.removeprefix('docs/')}-{scene.number}-{first}"


@pytest.mark.parametrize("scene", SCENES, ids=name_of)
def test_what_a_page_shows_runs(
    scene: Scene,
    samples: Samples,
    tmp_path: Path,
    swift: S3Service,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    swift.enter(monkeypatch)
    stage = Stage(tmp_path / "stage", samples, scene)
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = os.environ | {"HOME": str(stage.folder), "PATH": path}
    if "--part auto" in " ".join(one.line for one in scene.commands):
        environment |= {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    for shown in scene.commands:
        if shown.line in NOT_RUN:
            continue
        if shown.line in BEFORE:
            line, file = BEFORE[shown.line]
            done = stage.run(shlex.split(line), environment)
            assert done.returncode == 0, done.stderr
            if file:
                (stage.folder / file).write_text(done.stdout)
        words = words_of(scene, shown.line)
        done = stage.run(words, environment | dict(shown.environment))
        wanted = CODES.get(shown.line, shown.code or 0)
        said = f"ftckpt {shlex.join(words)}\n{stage.shown(done.stderr)}\n{stage.shown(done.stdout)}"
        assert done.returncode == wanted, said
        printed = stage.shown(f"{done.stdout}\n{done.stderr}").splitlines()
        output = shown.output if scene.page not in OTHER_ANSWERS else ()
        for line in map(without_numbers, output):
            start = line.partition("…")[0]
            assert any(one.startswith(start) for one in printed), f"{line}\n\n{said}"


def test_the_tables_name_what_pages_show_and_nothing_else() -> None:
    lines = {one.line for scene in SCENES for one in scene.commands}
    prose = {one.line for scene in SCENES if not scene.language for one in scene.commands}
    for table in (NOT_RUN, BEFORE, CODES):
        assert set(table) <= lines
    assert set(WHOLE) <= prose
    told = [told_of(scene) for scene in SCENES]
    for pattern, _ in PLACES:
        assert any(re.search(pattern, one) for one in told), pattern
    assert set(OTHER_ANSWERS) <= {scene.page for scene in SCENES if scene.commands[0].output}


def test_most_is_run() -> None:
    assert len(NOT_RUN) == 8
    assert sum(len(scene.commands) for scene in SCENES) > 250


@pytest.mark.parametrize("page", [one for one in PAGES if one.suffix == ".md"], ids=str)
def test_no_command_stands_where_none_is_looked_for(page: Path) -> None:
    """Not in indented blocks, and not in blocks of another language than a shell's."""
    language = None
    for line in page.read_text().splitlines():
        if line.startswith("```"):
            language = line[3:] if language is None else None
        looked_for = language in SHELLS or (language is None and not line.startswith("    "))
        assert looked_for or not re.match(r"\s*(\$ )?ftckpt [a-z]", line), line
