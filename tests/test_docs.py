"""What the documents say is what the program does."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import pytest

from ftckpt import findings
from ftckpt.commands.cli import app, verbs
from ftckpt.commands.cli.app import run
from ftckpt.commands.cli.invocation import Invocation
from ftckpt.commands.cli.mistakes import resolve
from ftckpt.commands.cli.render import MEANINGS, json_text
from ftckpt.errors import PRECEDENCE, ExitCode, UsageError
from ftckpt.operations import HOMES, schemas
from tests.builders.checkpoints import flip, save_dcp
from tests.documented import DOCS, PAGES, ROOT, in_shell, scenes
from tests.json_run import ftckpt_json

SCHEMAS = DOCS / "schemas"


def test_every_verb_is_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    for verb in verbs.VERBS:
        assert f"`{verb}`" in text, verb


def test_summaries_are_the_first_lines_of_the_verbs() -> None:
    for verb, summary in verbs.VERBS.items():
        doc = verbs.load(verb).help or ""
        assert doc.splitlines()[0] == summary + ".", verb


def test_every_verb_has_examples_and_codes() -> None:
    for verb in verbs.VERBS:
        loaded = verbs.load(verb)
        assert loaded.examples, verb
        assert ExitCode.OK in loaded.codes, verb
        for line, does in loaded.examples:
            assert "ftckpt " in line, line
            assert does, line


def test_exit_codes_are_documented() -> None:
    text = (DOCS / "exit-codes.md").read_text()
    rows = {}
    for row in re.findall(r"^\| (\d+) \| (\w+) \| (.+?) \| (.+?) \|", text, re.MULTILINE):
        rows[ExitCode(int(row[0]))] = row[1:]
    assert rows == {c: (c.name, m.meaning, m.retry) for c, m in MEANINGS.items()}
    order = text.split("in this order: ")[1].split(".")[0]
    assert [int(n) for n in order.split(",")] == [int(c) for c in PRECEDENCE if c]


def test_findings_are_documented() -> None:
    assert (DOCS / "findings.md").read_text() == findings.reference(), (
        "run: python -m ftckpt.findings > docs/findings.md"
    )


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *DOCS.glob("*.md")):
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_pictures_are_of_one_style() -> None:
    """Each says what it shows, and has the colours of the others, light and dark."""
    from xml.etree import ElementTree

    colours = set()
    for picture in DOCS.glob("*.svg"):
        tags = [one.tag.rpartition("}")[2] for one in ElementTree.parse(picture).getroot()]
        assert tags[:3] == ["title", "desc", "style"], picture
        colours.add(re.sub(r"\s+", " ", picture.read_text().split(":root")[1].split("} }")[0]))
    assert len(colours) == 1


def schema_of(name: str) -> dict[str, Any]:
    schema = json.loads((SCHEMAS / f"{name}.schema.json").read_text())
    assert isinstance(schema, dict)
    return schema


def validate(document: dict[str, Any]) -> None:
    """Hold a document to the schema that it names."""
    from jsonschema import Draft202012Validator

    name = document["schema"].removeprefix("ftckpt.").partition("/")[0]
    Draft202012Validator(schema_of(name)).validate(document)
    if name == "alert":  # no verb's answer
        return
    assert list(document)[-1] == "result"


def test_every_verb_has_a_sound_schema() -> None:
    from jsonschema import Draft202012Validator

    names = {p.name.removesuffix(".schema.json") for p in SCHEMAS.iterdir()}
    assert names == {*(verb.replace(" ", "-") for verb in verbs.VERBS), "ftckpt", "alert"}
    text = (DOCS / "json.md").read_text()
    for name in names:
        Draft202012Validator.check_schema(schema_of(name))
        assert f"schemas/{name}.schema.json" in text


# The operations whose schemas are kept by hand, because their answers have fields that are no
# report's: known before it is made, or lists. One goes when its schema is made; none is added.
BY_HAND = {
    *("cat", "convert", "copy", "delta_pack", "delta_rebase", "delta_unpack", "diff", "families"),
    *("gc", "gc_undelete", "guard", "incidents", "inspect", "latest", "ls", "pin", "plan"),
    *("plan_compress", "plan_elastic", "plan_risk", "plan_sweep", "promote", "repair"),
    *("replay_compare", "replay_run", "reshard", "restart", "rm", "status", "sync", "tag"),
}


@pytest.mark.parametrize("name", schemas.MADE)
def test_schemas_are_made_of_the_reports(name: str) -> None:
    assert (SCHEMAS / schemas.file_of(name)).read_text() == schemas.text_of(name), (
        "run: python -m ftckpt.operations.schemas docs/schemas"
    )


def test_each_other_schema_is_known_to_be_kept_by_hand() -> None:
    operations = {name for name in HOMES if (SCHEMAS / schemas.file_of(name)).exists()}
    assert operations - set(schemas.MADE) == BY_HAND


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    save_dcp(root / "step-7")
    (root / "latest").write_text("step-7")
    (root / "notes.txt").write_text("x")
    # Whichever cases a worker gets, `status --parts` finds a record.
    ftckpt_json("verify", f"{root}/step-7", "--part", "0/2", "--parts", f"{root}/../parts")
    return root


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("inspect ROOT/step-7 --tensors --files", 0),
        ("inspect ROOT/step-7 --tensor layers.0.weight", 0),
        ("inspect ROOT", 0),
        ("inspect ROOT/step-7 --match *.weight --sort bytes", 0),
        ("ls ROOT --all", 0),
        ("ls ROOT/absent", 9),
        ("du ROOT/step-7 --depth 1", 0),
        ("du ROOT/step-7 --match nothing*", 9),
        ("cat ROOT/step-7 layers.0.weight --slice 0:1", 0),
        ("cat ROOT/step-7 layers.0.weight --format stats", 0),
        ("cat ROOT/step-7 layers.0.weight --format hist", 0),
        ("cat ROOT/step-7 layers.0.weight --format npy", 2),
        ("cat ROOT/step-7 absent", 9),
        ("inspect ROOT@8", 9),
        ("verify ROOT/step-7", 0),
        ("verify ROOT --all", 0),
        ("verify ROOT/step-7 --part 0/2 --parts ROOT/../parts", 0),
        ("verify ROOT/step-7 --finish --parts ROOT/../parts", 5),
        ("seal ROOT/step-7 --part 0/2 --parts ROOT/../parts", 0),
        ("convert ROOT/step-7 ROOT/../c --to safetensors --part 0/2 --parts ROOT/../parts", 0),
        ("reshard ROOT/step-7 ROOT/../r --dp 2 --part 0/2 --parts ROOT/../parts", 0),
        ("repair ROOT/step-7 --from ROOT/step-7 --part 0/2 --parts ROOT/../parts", 13),
        ("status --parts ROOT/../parts", 0),
        ("status --parts ROOT/../absent", 9),
        ("copy ROOT/step-7 ROOT/../parted --part 0/2 --parts ROOT/../parts", 0),
        ("copy ROOT/step-7 ROOT/../parted --finish --parts ROOT/../parts", 5),
        ("verify ROOT/absent", 9),
        ("verify ROOT/notes.txt", 13),
        ("latest ROOT --level content", 0),
        ("latest ROOT --step-at-most 1", 8),
        ("latest ROOT --level values --reuse 1h --ledger ROOT/../kept", 0),
        ("latest ROOT --world 3 --require model", 0),
        ("reshard ROOT/step-7 ROOT/.two --dp 2 --dry-run", 0),
        ("reshard ROOT/absent ROOT/.x --dp 2", 9),
        ("convert ROOT/step-7 ROOT/notes.txt --to safetensors", 8),
        ("convert ROOT/step-7 ROOT/.y --to nothing", 2),
        ("convert ROOT/step-7 ROOT/.y --to nvrx-local", 13),
        ("diff ROOT/step-7 ROOT/step-7 --top 0", 0),
        ("diff ROOT/step-7 ROOT/absent", 9),
        ("diff ROOT ROOT/step-7", 2),
        ("plan --gpus 16384 --gpu-mtbf 50000h --save 60s", 0),
        ("plan --preset llama3 --params 405B --storage-bw 2TB/s --gpu-hour 2.33 --run 54d", 0),
        ("plan --failures 9/9d --snapshot 2s --flush 60s --set step-time=3s --model young", 0),
        ("plan --mtbf 3h --tier name=a,cost=1s,covers=80% --tier name=b,cost=60s", 0),
        ("plan --mtbf 3h --save 60s --simulate --runs 4 --set failures-per-run=20", 0),
        ("plan --from ROOT --save 5s --mtbf 3h", 0),
        ("plan --mtbf 3h --save 60s --set weights-between=3 --set rewarm=5m", 0),
        (
            (
                "plan --mtbf 3h --save 60s --set silent-mtbf=9d --set "
                "detection-latency=2h --simulate --runs 4"
            ),
            0,
        ),
        ("plan --gpus 64 --gpu-mtbf 900h --save 60s --simulate --set ageing=gpu=0.7 --runs 4", 0),
        ("plan --preset list", 0),
        ("plan --mtbf 3h --params 7B --storage-bw 5GB/s --set read-bw=10GB/s --restart 2m", 0),
        ("plan --save 60", 2),
        ("plan sweep --over gpus=1k..8k --gpu-mtbf 50000h --save 60s", 0),
        ("plan sweep --over save=1s..9h --mtbf 1h", 0),
        ("plan sweep --over save=1s..10m --over mtbf=1h..8h", 0),
        ("plan sweep --over save=9", 2),
        ("plan elastic --from 64 --to 48 --batch 2048 --lr 1e-3 --restart 6m", 0),
        ("plan compress --bytes 9GB --ratio 2 --codec-bw 4GB/s --storage-bw 1GB/s", 0),
        ("plan risk --gpus 1024 --gpu-mtbf 9% --run 30d", 0),
        ("incidents ROOT/latest", 9),
        ("incidents ROOT/absent", 9),
        ("help exit-codes", 0),
        ("help plan sweep", 0),
        ("help nothing", 2),
        ("completions fish", 0),
        ("latest", 2),
        ("nothing", 2),
    ],
)
def test_answers_fit_their_schema(saved: Path, arguments: str, code: int) -> None:
    document = ftckpt_json(*arguments.replace("ROOT", str(saved)).split())
    assert document["result"]["code"] == code, document["result"]
    validate(document)


def test_a_wrong_command_line_has_an_answer_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in verbs.VERBS:
        invocation = Invocation(verb=verb, json=True)
        result = run([*verb.split(), "--nosuch", "--json"], invocation)
        assert result.code is ExitCode.USAGE, verb
        validate(json.loads(json_text(app.document(invocation, result))))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("flags", [["--to", "safetensors"], ["--to", "torchsave", "--no-proof"]])
def test_answers_about_transfers_fit_their_schema(
    saved: Path, tmp_path: Path, flags: list[str]
) -> None:
    for code in (0, 8):
        document = ftckpt_json("convert", str(saved / "step-7"), str(tmp_path / "out"), *flags)
        validate(document)
        assert document["result"]["code"] == code


def test_answers_about_damage_and_seals_fit_their_schema(saved: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(saved, root)
    for expected in (True, False):
        document = ftckpt_json("seal", str(root / "step-7"))
        validate(document)
        assert (document["result"]["code"], document["written"]) == (0, expected)
    file = root / "step-7" / "__0_0.distcp"
    flip(file, file.stat().st_size // 2)
    for arguments in (("verify", f"{root}/step-7"), ("latest", str(root), "--level", "content")):
        document = ftckpt_json(*arguments)
        validate(document)
        assert document["result"]["code"] == 4
    document = ftckpt_json("seal", str(root / "step-7"), "--level", "structure")
    validate(document)
    assert document["result"]["code"] == 8


def test_the_validator_would_notice() -> None:
    from jsonschema import ValidationError

    result = {"code": 0, "name": "OK", "message": "", "hint": ""}
    document = {"schema": "ftckpt.latest/1", "target": "x", "format": None, "result": result}
    with pytest.raises(ValidationError):
        validate(document)
    with pytest.raises(ValidationError):
        validate({**document, "surprise": 1, "result": result | {"code": 4}})


# --- documented commands --------------------------------------------------------------------------

DURATION = re.compile(r"\d+(?:\.\d+)?(?:ms|s|m|h|d)")
PLACEHOLDER = re.compile(r"[$A-Z{<%]|.*[$<{]")  # N, STEP, $ROOT, {}


def complaint(words: Sequence[str]) -> str:
    """Return what the real command line says against a command; "" where it parses."""
    if words[0] == "version":
        return ""
    try:
        verb, rest = resolve(list(words))
    except UsageError as error:
        return "" if f"{words[-1]} is several verbs" in error.message else error.message
    command = verbs.load(verb)
    try:
        with command.make_context(verb, rest, obj=Invocation(verb=verb)) as parsed:
            return next(wrong_values(command, parsed.params), "")
    except click.exceptions.Exit:  # --help
        return ""
    except click.UsageError as error:
        said = error.format_message()
        kind = type(error).__name__
        # Prose names a verb or an option without what belongs to it, or with a word for it.
        open_ended = kind == "MissingParameter"
        open_ended |= kind == "BadOptionUsage" and words[-1] in said
        placeholder = kind == "BadParameter" and any(PLACEHOLDER.match(w) for w in words[1:])
        return "" if open_ended or placeholder else said


def wrong_values(command: Any, given: dict[str, Any]) -> Iterator[str]:
    """Yield what the verb itself would refuse of values that parse as texts."""
    from ftckpt.operations.choosing import require_one_root

    for parameter in command.params:
        value: Any = given.get(parameter.name)
        if parameter.param_type_name == "argument":
            for path in value if isinstance(value, (list, tuple)) else (value,):
                if DURATION.fullmatch(str(path)):
                    yield f"{path} stands where {parameter.name} belongs"
            continue
        told = parameter.metavar == "T" and value and not PLACEHOLDER.match(value)
        if told and not (DURATION.fullmatch(value) or value.isdecimal()):
            yield f"{parameter.opts[0]} {value} cannot be a duration"
    if isinstance(given.get("root"), (list, tuple)):
        one_root = ("wait", "pointer", "series", "create_root", "allow_missing_tier")
        try:
            require_one_root(given["root"] or (), **{name: given[name] for name in one_root})
        except UsageError as error:
            yield str(error)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_documented_commands_are_those_of_the_program(page: Path) -> None:
    """Options exist, choices are choices, numbers are numbers; also inline and behind `|| true`."""
    shown = [one for scene in scenes(page) for one in scene.commands]
    wrong = {one.line: said for one in shown if (said := complaint(one.words))}
    assert not wrong


def test_the_examples_of_the_help_are_commands_of_the_program() -> None:
    for verb in verbs.VERBS:
        for line, _ in verbs.load(verb).examples:
            for one in in_shell(line):
                assert not complaint(one.words), line


def test_a_wrong_documented_command_is_found() -> None:
    for line in (
        "plan elastic --gpus 8 --to 6", "gc purge run --older 1d", "lattest run",
        "latest run --wait 10m", "latest run more --wait", "latest run --level everything",
        "latest run --wait --timeout soon",
    ):  # fmt: skip
        assert complaint(line.split()), line
    for line in ("verify run@7 --level values", "latest $ROOT --wait --timeout T", "plan --help"):
        assert not complaint(line.split()), line
    shown = in_shell(
        'CKPT=$(ftckpt latest "$ROOT" --level content) || exit $?; ftckpt ls x || true'
    )
    assert [one.words for one in shown] == [("latest", "$ROOT", "--level", "content"), ("ls", "x")]
