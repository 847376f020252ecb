"""A mistyped command line: one line in plain words that says what to type, and nothing runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ftckpt.commands.cli import app, mistakes, verbs
from ftckpt.commands.cli.invocation import Invocation
from ftckpt.errors import ExitCode, UsageError

RUN = Path(__file__).parents[2] / "data" / "run"


def said(*words: str) -> tuple[str, str]:
    """Return message and hint of a command line that is refused."""
    with pytest.raises(UsageError) as caught:
        app.execute(words, Invocation())
    return caught.value.message, caught.value.hint


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("list run", 'ftckpt has no verb "list": ftckpt ls lists the checkpoints of a root'),
        ("fsck run", 'ftckpt has no verb "fsck": ftckpt verify checks a checkpoint'),
        ("Check run", 'ftckpt has no verb "Check": ftckpt verify checks a checkpoint'),
        ("undo run", 'ftckpt has no verb "undo": ftckpt gc undelete restores what was dropped'),
        ("VERIFY run", 'ftckpt has no verb "VERIFY": verbs are written in small letters: ftckpt'
         " verify"),
        ("GC Undelete run", 'ftckpt has no verb "GC": verbs are written in small letters: ftckpt gc'
         " undelete"),
        ("verfy run", 'ftckpt has no verb "verfy": did you mean ftckpt verify?'),
        ("latst x", 'ftckpt has no verb "latst": did you mean ftckpt latest?'),
        ("undelete run", 'ftckpt has no verb "undelete": did you mean ftckpt gc undelete?'),
        ("undelet run", 'ftckpt has no verb "undelet": did you mean ftckpt gc undelete?'),
        ("frobnicate", 'ftckpt has no verb "frobnicate": ftckpt --help lists the verbs'),
        ("/ckpt/run7", '"/ckpt/run7" is a place, and a verb comes first: ftckpt ls /ckpt/run7'),
        ("delta", "delta is several verbs: delta pack, delta unpack, delta info and delta rebase"),
        ("delta show x", 'ftckpt has no verb "delta show": there are delta pack, delta unpack,'
         " delta info and delta rebase"),
    ],
)  # fmt: skip
def test_a_word_that_is_no_verb_leads_to_one(words: str, message: str) -> None:
    assert said(*words.split()) == (message, "")


@pytest.mark.parametrize("word", ["prune", "rollback", "backup", "forget", "delete", "restore"])
def test_a_word_for_deleting_or_writing_runs_nothing(word: str, tmp_path: Path) -> None:
    message, _ = said(word, str(tmp_path))
    assert message.startswith(f'ftckpt has no verb "{word}": ftckpt ')
    assert list(tmp_path.iterdir()) == []


def test_what_is_said_of_other_words_is_true() -> None:
    assert [verb for meant in mistakes.TRIED.values() for verb in meant
            if verb not in verbs.VERBS] == []  # fmt: skip
    assert [word for word in mistakes.TRIED if verbs.is_verb(word) or word != word.lower()] == []
    assert {*mistakes.DOES} <= {*verbs.VERBS}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("verify", "verify needs PATH: a checkpoint or root: local path"),
        ("cat run", "cat needs TENSOR: a tensor, an object"),
        ("plan risk --gpus 4 --days 3", "plan risk needs --afr RATE: failures of one GPU"),
        ("verify run --lvl content", "verify has no option --lvl; did you mean --level or --all?"),
        ("verify run -level content", "-level is written with two minus signs: --level"),
        ("verify run -json", "-json is written with two minus signs: --json"),
        ("verify run \u2014level", "more arguments than verify takes: \u2014level"),
        ("verify run --level deep", "--level takes auto, structure, content or values, not"
         ' "deep"'),
        ("verify run --level Content", "--level takes auto, structure, content or values, not"
         ' "Content"; did you mean content?'),
        ("verify run --level", "--level needs a value: auto, structure, content or values"),
        ("gc run --keep-last", "--keep-last needs a value: N, the N newest"),
        ("gc run --keep-last 0", '--keep-last takes a whole number from 1, not "0"'),
        ("gc run --keep-last three", '--keep-last takes a whole number from 1, not "three"'),
        ("verify run --jobs 1.5", '--jobs takes a whole number from 0, not "1.5"'),
        ("verify run --retry-seconds soon", '--retry-seconds takes a number from 0, not "soon"'),
        ("verify run --retry-seconds nan", '--retry-seconds takes a number from 0, not "nan"'),
        ("reshard a b --zero-stage 4", '--zero-stage takes a whole number from 1 to 3, not "4"'),
        ("verify run --json=1", "--json takes no value: write --json alone"),
        ("verify run --threads 4", "verify has no option --threads; did you mean --jobs?"),
        ("gc run --keep-last 3 --dry-run", "gc has no option --dry-run: without --apply nothing"),
        ("ls run -r", "ls has no option -r: what is below a root is found without it"),
        ("ls run --color", "ls has no option --color: colours are shown on terminals alone"),
        ("ls run --format json", "ls has no option --format: --json prints the answer"),
        ("ls run --keep-last 3", "ls has no option --keep-last; it is one of gc"),
        ("ls run -x", "ls has no option -x"),
        ("seal first of a path", "more arguments than seal takes: of a path"),
        ("completions tcsh", 'SHELL takes bash, zsh or fish, not "tcsh"'),
        ("--level content verify run", "--level cannot stand before the verb"),
        ("--no-color ls run", "ftckpt has no option --no-color: colours are shown"),
    ],
)  # fmt: skip
def test_an_option_that_is_wrong(words: str, message: str) -> None:
    found, _ = said(*words.split())
    assert found.startswith(message)
    assert (
        re.search("[Ii]nvalid value|No such|[Gg]ot unexpected|Missing |not a valid", found) is None
    )


def test_a_variable_is_named_where_its_value_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTCKPT_RETRY_SECONDS", "many")
    message, _ = said("verify", str(RUN))
    assert message == 'FTCKPT_RETRY_SECONDS (--retry-seconds) takes a number from 0, not "many"'
    monkeypatch.setenv("FTCKPT_RETRY_SECONDS", "1")
    monkeypatch.setenv("FTCKPT_JSON", "maybe")
    message, _ = said("verify", str(RUN))
    assert message == 'FTCKPT_JSON (--json) takes 1 or 0, not "maybe"'


def test_a_long_value_is_not_repeated_whole() -> None:
    message, _ = said("verify", "run", "--jobs", "9" * 1000)
    assert len(message) < 150
    assert '"9999' in message


@pytest.mark.parametrize("options", [["--json"], ["--json", "--endpoint", "http://127.0.0.1:9"]])
def test_common_options_stand_before_the_verb_or_behind_it(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    answers = []
    for words in ([*options, "ls", str(RUN)], ["ls", *options, str(RUN)]):
        with pytest.raises(SystemExit) as ended:
            app.main(words)
        assert ended.value.code == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0]["schema"] == answers[1]["schema"] == "ftckpt.ls/1"
    steps = [[one["step"] for one in answer["checkpoints"]] for answer in answers]
    assert steps[0] == steps[1] == [2, 1]


def test_help_before_the_verb_is_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    pages = []
    for words in (("-h", "verify"), ("verify", "-h"), ("--help", "verify"), ("verify", "--help")):
        assert app.execute(words, Invocation()).code is ExitCode.OK
        pages.append(capsys.readouterr().out)
    assert pages[0] == pages[1]
    assert pages[2] == pages[3]
    assert pages[0] != pages[2]
    assert app.execute(("delta", "-h"), Invocation()).code is ExitCode.OK
    assert "delta rebase  Rewrite" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        ("gc undlete run", 'ftckpt has no verb "gc undlete": did you mean ftckpt gc undelete?',
         "a place of this name is ./undlete"),
        ("plan swep", 'ftckpt has no verb "plan swep": did you mean ftckpt plan sweep?',
         "a place of this name is ./swep"),
        ("verify run 1000", "more arguments than verify takes: 1000",
         "a step is written with its root: run@1000"),
        ("verify run @latest", "more arguments than verify takes: @latest",
         "a step is written with its root: run@latest"),
        ("gc run keep-last 3", "more arguments than gc takes: 3",
         "an option begins with two minus signs: --keep-last"),
        ("verify run \u2014level content", "more arguments than verify takes: \u2014level content",
         "that is a text processor's dash, not two minus signs: --level"),
        ("verify run --max-memory lots", "--max-memory: 'lots' is not a size in bytes",
         "write 512M, 1GiB or 1.5GB"),
        ("verify run --limit-rate 5", "--limit-rate: '5': a rate needs its unit",
         "write 200MiB/s or 500B/s"),
        ("verify run --sample five", "--sample: 'five' is not a share between 0 and 100 %",
         "write 5% or 0.05"),
        ("gc run --keep_last 3", "gc has no option --keep_last; did you mean --keep-last?",
         "ftckpt gc -h shows how it is used"),
        ("ls run --JSON", "ls has no option --JSON; did you mean --json?",
         "ftckpt ls -h shows how it is used"),
        ("--jsn ls run", "ftckpt has no option --jsn; did you mean --json?", ""),
        ("-- verify run", 'ftckpt has no verb "--": ftckpt --help lists the verbs', ""),
    ],
)  # fmt: skip
def test_what_to_type_instead(words: str, message: str, hint: str) -> None:
    assert said(*words.split()) == (message, hint)


def test_a_second_word_that_is_there_is_a_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "purg").mkdir()
    assert mistakes.resolve(["gc", "purg"]) == ("gc", ["purg"])
    assert mistakes.resolve(["gc", "./undlete"]) == ("gc", ["./undlete"])
