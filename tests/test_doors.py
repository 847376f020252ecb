"""The shell and Python say the same of the same words."""

from __future__ import annotations

import gzip
import inspect
import json
import os
import re
import shutil
from dataclasses import fields, is_dataclass
from hashlib import sha256
from pathlib import Path
from time import time
from typing import Any

import pytest

import ftckpt
from ftckpt.commands.cli import app, verbs
from ftckpt.commands.cli.invocation import Invocation
from ftckpt.commands.cli.mistakes import resolve
from ftckpt.commands.cli.render import json_text
from ftckpt.errors import ExitCode, FtckptError, NotFoundError, UsageError
from ftckpt.observer import Observer
from ftckpt.operations.definition import call, groups, taken
from ftckpt.reports import document
from ftckpt.workers import budget
from tests.builders.checkpoints import flip, save_dcp

DATA = Path(__file__).parent / "data"


def said_by(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Return the exit code of a verb and what it says on stderr."""
    with pytest.raises(SystemExit) as ended:
        app.main(list(words))
    return int(ended.value.code or 0), capfd.readouterr().err


@pytest.mark.parametrize("text", ["1", "90000", "1.5", "soon"])
def test_a_duration_needs_its_unit_behind_both_doors(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], text: str
) -> None:
    save_dcp(tmp_path / "step-1", step=1)
    with pytest.raises(UsageError) as refused:
        ftckpt.latest(str(tmp_path), wait=True, timeout=text)
    code, stderr = said_by(capfd, "latest", str(tmp_path), "--wait", "--timeout", text)
    assert (code, refused.value.message in stderr) == (2, True)
    code, stderr = said_by(capfd, "gc", str(tmp_path), "--keep-last", "1", "--trash-ttl", text)
    assert (code, refused.value.message.replace("--timeout", "--trash-ttl") in stderr) == (2, True)


def test_convert_keeps_the_format_unless_another_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save_dcp(tmp_path / "step-1", step=1)
    source, shell, python = (str(tmp_path / name) for name in ("step-1", "shell", "python"))
    assert said_by(capfd, "convert", source, shell, "--only", "model")[0] == 0
    ftckpt.convert(source, python, only="model")
    assert [ftckpt.open_checkpoint(one).format for one in (shell, python)] == ["dcp", "dcp"]
    assert ftckpt.diff(shell, python).code is ExitCode.OK


def test_gaps_without_an_adapter_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save_dcp(tmp_path / "step-1", step=1)
    source, out = str(tmp_path / "step-1"), str(tmp_path / "out")
    with pytest.raises(UsageError) as refused:
        ftckpt.convert(source, out, "dcp", allow_gaps=True)
    code, stderr = said_by(capfd, "convert", source, out, "--to", "dcp", "--allow-gaps")
    assert (code, refused.value.message in stderr) == (2, True)


@pytest.mark.parametrize(
    "words",
    [
        ("convert", "SRC", "out", "--to", "dcp"),
        ("reshard", "SRC", "out", "--dp", "2"),
        ("delta", "unpack", "SRC", "out"),
    ],
)
def test_the_memory_limit_holds_while_the_source_is_opened(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    words: tuple[str, ...],
) -> None:
    seen: list[int] = []

    def opens(*_: object) -> None:
        seen.append(budget.budget())
        raise NotFoundError("nothing is opened here")

    before = budget.budget()
    monkeypatch.setattr("ftckpt.discovery.resolve.open_target", opens)
    try:
        said_by(capfd, *words, "--max-memory", "123MiB")
    finally:
        budget.set_budget(before)
    assert seen == [123 << 20]


# One line of each kind for every operation that has one definition, right and wrong ones. STEP and
# OTHER are saves, BAD is one with a changed byte, DELTA packs STEP against OTHER, ROOT holds saves;
# ZERO holds one of two ranks.
LINES = """
incidents job.log --nodes 4
incidents job.log --prometheus metrics.json --run run7
incidents job.log words.log --together 0s
incidents words.log
incidents nowhere
incidents cut.log.gz job.log
incidents job.log --together 15
incidents job.log --timezone Nowhere/Land
inspect STEP
inspect STEP --tensors --files --sort bytes
inspect STEP --tensor *
inspect STEP --match nothing*
inspect ROOT --resume
inspect ROOT@1
inspect nowhere
du STEP --depth 1
du ROOT
du STEP --match nothing*
verify STEP
verify STEP --level values --strict
verify STEP --sample 50%
verify STEP --sample 200%
verify STEP --against OTHER
verify STEP --ledger kept
verify STEP --level content --jobs 2 --limit-rate 1GiB/s
verify STEP --limit-rate 5
verify STEP --strict=nothing
verify BAD
verify ROOT
verify ROOT --all
scrub ROOT
scrub ROOT --budget 5m
scrub STEP
scrub ROOT --budget 5
verify STEP --all --part 0/2
verify nowhere
seal STEP
seal STEP --level structure
seal STEP --integrity
seal STEP --max-memory much
seal BAD
seal ROOT
diff STEP STEP
diff STEP OTHER --component model
diff STEP OTHER --rtol 1
diff STEP BAD
diff STEP STEP --component nothing
diff STEP STEP --rename nowhere.toml
diff STEP nowhere
copy STEP made
copy STEP made --no-proof --unmanaged
copy STEP made --include-bases
copy BAD made
copy ROOT made
copy STEP OTHER
copy STEP made --limit-rate 5
copy STEP made --restart --part 0/2
repair BAD --from STEP --dry-run
repair BAD --from STEP
repair STEP --from OTHER
repair STEP
repair nowhere --from STEP
latest ROOT
latest ROOT --level content --reuse 1h
latest ROOT --reuse 1h
latest ROOT --reuse soon --level content
latest ROOT --level values
latest ROOT --step-at-most 0
latest ROOT --step-at-most 1
latest ROOT --require model,nothing
latest ROOT --require model,rng
latest ROOT --world 3
latest ROOT --wait --timeout 1s
latest ROOT --pointer nothing
latest ROOT --pointer nothing --wait
latest ROOT --series nothing
latest ROOT --also tier
latest ROOT --allow-missing-tier
latest tier ROOT
latest ROOT nowhere
latest ROOT nowhere --allow-missing-tier
latest ROOT tier --wait
latest STEP
latest tier
latest tier --create-root
latest nowhere
latest nowhere --create-root
restart ROOT --world 3
restart ROOT --world 3 --level structure --require rng
restart ROOT --world 3 --step-at-most 0
restart ROOT --world 3 --reuse soon
restart STEP --world 2
restart nowhere --world 2
restart ZERO --world 4
restart ZERO --world 4 --reader
restart ZERO --world 4 --scratch made
restart ZERO --world 4 --scratch made --dp 3
restart ZERO --world 4 --scratch made --rules nowhere.toml
guard ROOT -- true
guard ROOT --max-restarts 0 --timeout 1s --no-lock -- sh -c false
guard ROOT --step-at-most 0 --timeout 0s -- true
guard ZERO --world 4 --reader --batch 8 --lr 1 -- true
guard ZERO --world 4 --timeout 0s -- true
guard BAD -- true
guard tier -- true
guard nowhere -- true
guard ROOT --save-signal NOPE -- true
guard ROOT --notice-signal MARS -- true
guard ROOT --alert-url here -- true
guard ROOT --limit-rate 5 -- true
guard ROOT --every 15 -- true
guard ROOT --prometheus m.json -- true
sync ROOT tier --newest 1
sync ROOT tier --dry-run
sync ROOT tier --tag nothing
sync ROOT ROOT
sync ROOT nowhere
sync STEP tier
convert STEP made --to safetensors
convert STEP made --to safetensors --only model --dtype bf16
convert STEP made --to safetensors --dry-run
convert STEP made --names hf
convert STEP made --spelling local
convert STEP made --drop nothing*
convert STEP OTHER --to dcp
convert BAD made --to safetensors
convert STEP made --allow-gaps
convert STEP made --max-shard-size 1X
convert STEP made --restart --part 0/2
reshard STEP made --dp 2
reshard STEP made --dp 2 --dry-run --no-proof
reshard STEP made --tp 2
reshard STEP made --only adapter
reshard STEP made --like nowhere
reshard ROOT made --dp 2
delta pack STEP made
delta pack OTHER STEP made --level 1
delta pack OTHER STEP made --rename nowhere.toml
delta pack OTHER STEP made --no-proof --storage-bw 2GB/s
delta pack STEP made --rename nowhere.toml
delta pack STEP
delta pack nowhere STEP made
delta pack BAD made
delta pack STEP made --storage-bw 2
delta pack STEP made --restart --part 0/2
delta unpack DELTA made
delta unpack DELTA made --to safetensors --dry-run
delta unpack DELTA made --dp 2 --no-proof
delta unpack STEP made
delta unpack DELTA made --to pdf
delta info DELTA
delta info DELTA --advise
delta info DELTA --base nowhere
delta info DELTA --storage-bw 2GB/s
delta info STEP
delta rebase DELTA made --onto none
delta rebase DELTA made --onto STEP --storage-bw 2GB/s
delta rebase DELTA made
delta rebase STEP made
plan --mtbf 3h --save 60s
plan --gpus 16k --gpu-mtbf 50000h --params 405B --storage-bw 2TB/s --max-loss 5m --gpu-hour 2.33
plan --failures 419/54d --snapshot 1.5s --flush 40s --simulate --runs 4 --set failures-per-run=20
plan --mtbf 3h --tier name=ram,cost=1s,restore=10s,covers=80% --tier name=shared,cost=60s
plan --mtbf 3h --save 60s --set weights-between=2 --set weights-save=8s --interval 20m
plan --from ROOT --mtbf 3h --save 60s
plan --from nowhere --mtbf 3h
plan --from-log words.log --save 60s
plan --mtbf 3h
plan --mtbf 3 --save 60s
plan --save 60s
plan --mtbf 3h --save 60s --set law=weibull:0.7
plan --preset list
plan sweep --over gpus=1k..4k --gpu-mtbf 50000h --save 60s
plan sweep --over mtbf=30m..2d --over save=1s..10m --points 3
plan sweep --over speed=1..2 --mtbf 3h
plan sweep --over save=1s..10m --over save=1s..10m --mtbf 3h
plan sweep --over save=1s..10m --mtbf 3h --set weights-between=1
plan risk --gpus 1k --gpu-mtbf 9% --run 30d
plan risk --gpus 1k --gpu-mtbf 9% --run 0d
plan risk --gpus many --gpu-mtbf 9% --run 30d
plan elastic --from 64 --to 48 --batch 2048 --lr 1e-3
plan elastic --from 48 --to 64 --batch 1920 --lr 1e-3 --restart 6m
plan elastic --from 64 --to 64 --batch 2048 --lr 1e-3 --restart 6m
plan elastic --from 64 --to 48 --batch 2048 --lr fast
plan compress --bytes 100GB --ratio 2.5 --codec-bw 4GB/s --storage-bw 10GB/s
plan compress --bytes 0GB --ratio 2.5 --codec-bw 4GB/s --storage-bw 10GB/s
plan compress --bytes 100 --ratio 2.5 --codec-bw 4GB/s --storage-bw 10GB/s
promote ROOT@1
promote ROOT@2 --dry-run
promote ROOT/step-1 --pointer last-known-good --level structure --backwards
promote ROOT@1 --pointer nothing
promote ROOT
promote ROOT@7
promote STEP
promote nowhere@1
promote ROOT@1 --level values --limit-rate 5
promote ILL@1
replay audit STEP
replay audit STEP --strict
replay audit STEP --against OTHER
replay audit ROOT
replay audit nowhere
replay compare a.log b.log
replay compare a.log c.log
replay compare a.log b.log --reference c.log --from 2 --to 3
replay compare a.log nowhere
replay compare a.log words.log
replay run --dir trial --checkpoint STEP -- true
replay run --dir trial --timeout 5 -- true
replay run --dir trial -- no-such-program
replay run --dir trial --runs 1 --timeout 20s -- true
rm ROOT 1
rm ROOT 7
rm ROOT 1 2 --apply
pin ROOT 1 --reason why
pin ROOT 7 --reason why
pin ROOT 1
pin ROOT 1 --remove
pin ROOT 1 --remove --owner x --all
ls ROOT --all
tag ROOT latest a b
tag ROOT 7 a
tag ROOT 1 a --remove
families
families llama
families llama --config nowhere.json
families --config nowhere.json
families llama --config config.json
families gpt2 --config config.json
gc MANY --keep-last 1
gc MANY --keep-last 1 --min-survivors 1
gc MANY --keep-last 1 --min-survivors 1 --apply
gc MANY --keep-last 1 --apply
gc MANY --keep-last 2 --min-survivors 1 --apply --purge-now --yes
gc MANY --keep-last 2 --apply --trash-ttl 5
gc MANY --keep-last 2 --yes
gc MANY --keep-last 2 --min-survivors 1 --free 1TB
gc MANY --keep-tag a --metric worst
gc MANY --policy retention.toml --min-survivors 1
gc MANY --policy retention.toml --keep-last 2
gc MANY --tier x
gc MANY nowhere.json
gc MANY
gc MANY@1 --keep-last 1
gc nowhere --keep-last 1
gc undelete MANY
gc undelete MANY 1
gc undelete MANY 1 --all
gc undelete nowhere
gc purge MANY
gc purge MANY --trash-ttl 0s
gc purge MANY --trash-ttl 0s --yes
gc purge nowhere
ls ROOT
ls ROOT@1
ls STEP
ls ROOT --all
ls tier
ls nowhere
status ROOT --set late=1000000
status ROOT --expect-interval 22m --policy retention.toml --tier tier --scrub-every 1d
status ROOT --expect-interval 5
status ROOT --scrub-every 0s
status ROOT --policy nowhere.toml
status ROOT --tier nowhere
status ROOT --set late=1000000 --prometheus m.json
status ROOT --prometheus STEP
status ROOT@1
status nowhere
status
status --parts ROOT
doctor tier
doctor nowhere
doctor ROOT/step-1/__0_0.distcp
""".strip().splitlines()
CONFIG = """
{"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2,
 "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 32, "tie_word_embeddings": false}
"""
# What may differ from one run to the next.
TIMED = {"seconds", "time", "created", "bytes_read", "requests", "oldest", "mtime", "checked"}
TIMED |= {"advice", "break_even", "rates", "age_s", "free", "now", "fingerprint"}
TIMED |= {"guard", "identity", "since", "token"}  # of a process, and of files as they are


# What `restart` makes is named after the very files that it was made of; gc names by the time.
_PASSING = re.compile(r"(?<=world4-)[0-9a-f]{8}|\d{8}T\d{6}\.\d{6}Z")


class Recorder(Observer):
    """Keeps what an operation has reported."""

    def __init__(self) -> None:
        super().__init__()
        self.fields: dict[str, Any] = {}

    def report(self, **fields: Any) -> None:
        self.fields.update(fields)


def untimed(value: Any, place: Path) -> Any:
    if isinstance(value, dict):
        measured = {"found", "means"} if "area" in value else ()  # by the doctor
        found = {k: untimed(v, place) for k, v in value.items() if k not in {*TIMED, *measured}}
        if isinstance(found.get("plan"), str):
            del found["plan"]  # a digest, of times too
        if isinstance(found.get("findings"), list):  # threads find them in any order
            found["findings"].sort(key=repr)
        return found
    if isinstance(value, list):
        return [untimed(one, place) for one in value]
    return _PASSING.sub("", value.replace(str(place), "@")) if isinstance(value, str) else value


def files_below(place: Path) -> dict[str, str]:
    """Return the files by digests; of what says when it was made, the name alone."""
    return {
        _PASSING.sub("", str(path.relative_to(place))): ""
        if path.suffix in (".json", ".jsonl")
        else sha256(path.read_bytes()).hexdigest()
        for path in sorted(place.rglob("*"))
        if path.is_file()
    }


def by_shell(words: list[str], place: Path) -> tuple[int, str, Any]:
    verb = resolve(words)[0]
    invocation = Invocation(verb=verb, words=words, json=True, quiet=True)
    result = app.run(words, invocation)
    invocation.close()
    document = json.loads(json_text(invocation.document))
    return int(result.code), untimed(result.message, place), untimed(document, place)


def by_python(words: list[str], place: Path) -> tuple[int, str, Any]:
    heard = Recorder()
    name, rest = resolve(words)
    verb = verbs.load(name)
    operation = verb.operation
    assert operation is not None
    message, code = "", ExitCode.OK
    try:
        with verb.make_context(name, rest, obj=Invocation()) as ctx:
            known = {one.name for one in taken(operation)}
            known |= inspect.signature(operation).parameters.keys()
            given = {k: v for k, v in ctx.params.items() if k in known}
            for group, kind in groups(operation).items():
                names = {one.name for one in fields(kind)} & ctx.params.keys()
                given[group] = kind(**{name: ctx.params[name] for name in names})
        python = operation if name == "guard" else getattr(ftckpt, name.replace(" ", "_"))
        report = call(python, given | {"on": heard})
    except FtckptError as error:
        message, code = error.message, error.exit_code
    else:
        heard.report(**(document(report) if is_dataclass(report) else {}))
        message, code = getattr(report, "message", ""), getattr(report, "code", ExitCode.OK)
    found = json.loads(json_text(heard.fields))
    return int(code), untimed(message, place), untimed(found, place)


@pytest.fixture(scope="module")
def supply(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("doors") / "place"
    for number, name in enumerate(("STEP", "OTHER", "BAD", "ROOT/step-1", "ROOT/step-2")):
        save_dcp(place / name, step=number % 3 + 1)
    file = place / "BAD" / "__0_0.distcp"
    flip(file, file.stat().st_size // 2)
    shutil.copytree(DATA / "deepspeed" / "z2" / "global_step2", place / "ZERO" / "global_step2")
    ftckpt.delta_pack(str(place / "OTHER"), str(place / "STEP"), str(place / "DELTA"))
    shutil.copytree(place / "BAD", place / "ILL" / "step-1")
    for name, losses in (("a", "321"), ("b", "321"), ("c", "323")):
        lines = (f"step {n} loss {loss}.5" for n, loss in enumerate(losses, 1))
        (place / f"{name}.log").write_text("\n".join(lines))
    (place / "words.log").write_text("no step here")
    failed = (
        "2026-01-01T00:00:00Z n1 kernel: NVRM: Xid (PCI:0000:65:00): 79, GPU has fallen off the bus"
    )
    (place / "job.log").write_text(f"{failed}\n")
    (place / "cut.log.gz").write_bytes(gzip.compress(failed.encode() * 9)[:-12])
    for number in (1, 2, 3):
        save_dcp(place / "MANY" / f"step-{number}", step=number)
        os.utime(place / "MANY" / f"step-{number}" / ".metadata", (0, time() - 3600 + number))
    (place / "tier").mkdir()
    (place / "config.json").write_text(CONFIG)
    (place / "retention.toml").write_text('[[tier]]\nname = "x"\nroots = ["*"]\nkeep-last = 1\n')
    return place


@pytest.mark.parametrize("line", LINES)
def test_both_doors_do_and_say_the_same(
    line: str, supply: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = []
    for door in (by_shell, by_python):
        place = tmp_path / door.__name__
        shutil.copytree(supply, place)
        monkeypatch.chdir(place)
        code, message, found = door(line.split(), place)
        answers.append((code, found, files_below(place), message if code else ""))
    shell, python = answers
    assert shell[:3] == python[:3]
    assert shell[3] == python[3] or not python[3]  # a report may leave the sentence to the screen


@pytest.mark.parametrize(
    ("verb", "flag", "word"),
    [
        ("convert", "only", "weights"),
        ("convert", "dtype", "fp64"),
        ("convert", "names", "mine"),
        ("verify", "level", "deep"),
        ("seal", "level", "deep"),
        ("inspect", "sort", "size"),
        ("promote", "level", "auto"),
        ("latest", "level", "auto"),
    ],
)
def test_a_word_that_is_none_of_the_choices_is_refused_behind_both_doors(
    supply: Path, capfd: pytest.CaptureFixture[str], verb: str, flag: str, word: str
) -> None:
    places = [str(supply / "STEP"), *([str(supply / "made")] if verb == "convert" else [])]
    with pytest.raises(UsageError, match=word):
        getattr(ftckpt, verb)(*places, **{flag: word})
    code, stderr = said_by(capfd, verb, *places, f"--{flag}", word)
    assert (code, word in stderr) == (2, True)
    assert not (supply / "made").exists()
