"""The tracked completion scripts are what the app emits, and the shells accept them."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from ftckpt.commands.cli import verbs
from ftckpt.commands.completions import script, words_of_verbs

FOLDER = Path(__file__).parents[2] / "completions"
FILES = {"bash": "ftckpt.bash", "zsh": "_ftckpt", "fish": "ftckpt.fish"}


@pytest.mark.parametrize("shell", FILES)
def test_the_tracked_script_is_current(shell: str) -> None:
    assert (FOLDER / FILES[shell]).read_text() == script(shell), (
        f"run: ftckpt completions {shell} > completions/{FILES[shell]}"
    )


def test_every_verb_and_flag_is_offered() -> None:
    words = {verb.verb: verb for verb in words_of_verbs()}
    assert list(words) == list(verbs.VERBS)
    latest = {name: flag for flag in words["latest"].flags for name in flag.names}
    assert latest["--level"].values == ("structure", "content", "values")
    assert latest["--step-at-most"].takes_value
    assert not latest["--wait"].takes_value
    assert {"--json", "--endpoint", "--help"} <= latest.keys()
    assert words["completions"].words == ("bash", "zsh", "fish")


def bash(*words: str, cwd: Path | None = None) -> list[str]:
    """Return what bash offers for the last word, through its own completion machinery."""
    line = " ".join(words)
    quoted = " ".join(shlex.quote(word) for word in words)
    code = (
        f'source "{FOLDER / FILES["bash"]}"\n'
        f"COMP_WORDS=({quoted}) COMP_CWORD={len(words) - 1}\n"
        f"COMP_LINE={shlex.quote(line)} COMP_POINT={len(line)}\n"
        '_ftckpt ftckpt\nprintf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=cwd,
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes() -> None:
    shown = subprocess.run(
        ["bash", "--norc", "-c", f'source "{FOLDER / FILES["bash"]}"; complete -p ftckpt'],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert shown.stdout == "complete -o bashdefault -o default -F _ftckpt ftckpt\n"
    assert bash("ftckpt", "") == list(dict.fromkeys(verb.split()[0] for verb in verbs.VERBS))
    assert bash("ftckpt", "replay", "") == ["run", "compare", "audit"]
    assert bash("ftckpt", "replay", "run", "--ti") == ["--timeout"]
    assert bash("ftckpt", "la") == ["latest"]
    assert bash("ftckpt", "--ver") == ["--version"]
    assert bash("ftckpt", "latest", "--step") == ["--step-at-most"]
    assert bash("ftckpt", "latest", "x", "--level", "") == ["structure", "content", "values"]
    assert bash("ftckpt", "--debug", "verify", "--level", "v") == ["values"]
    assert bash("ftckpt", "completions", "") == ["bash", "zsh", "fish"]
    assert bash("ftckpt", "help", "exit") == ["exit-codes"]
    assert bash("ftckpt", "latest", "") == []  # file names, by -o default
    assert bash("ftckpt", "latest", "--timeout", "--w") == []
    assert bash("ftckpt", "plan", "") == ["sweep", "elastic", "compress", "risk"]
    assert bash("ftckpt", "plan", "--gpu-m") == ["--gpu-mtbf"]
    assert bash("ftckpt", "plan", "--model", "d") == ["daly"]
    assert bash("ftckpt", "plan", "sweep", "--ov") == ["--over"]
    assert bash("ftckpt", "plan", "--ov") == []
    assert sorted(bash("ftckpt", "gc", "", cwd=FOLDER)) == sorted(
        ["undelete", "purge", *FILES.values()]
    )
    assert bash("ftckpt", "gc", "READ", cwd=FOLDER.parent) == ["README.md"]
    assert bash("ftckpt", "gc", "purge", "", cwd=FOLDER.parent) == []  # file names, by -o default


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_accepts_the_script() -> None:
    # As installed: a folder of `fpath`, found by its `#compdef` line and loaded when first used.
    code = (
        f"fpath=({shlex.quote(str(FOLDER))} $fpath)\n"
        "autoload -Uz compinit && compinit -u -D\n"
        "print -r -- $_comps[ftckpt]\nautoload -Uz +X _ftckpt && print loaded\n"
    )
    done = subprocess.run(
        ["zsh", "-f", "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stdout, done.stderr) == ("_ftckpt\nloaded\n", "")


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes(tmp_path: Path) -> None:
    def offers(line: str) -> list[str]:
        code = f'source "{FOLDER / FILES["fish"]}"; complete -C {line!r}'
        done = subprocess.run(
            ["fish", "--no-config", "-c", code],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            cwd=tmp_path,
            env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        )
        return done.stdout.splitlines()

    def fish(line: str) -> list[str]:
        return [offer.split("\t")[0] for offer in offers(line)]

    assert fish("ftckpt la") == ["latest"]
    assert fish("ftckpt latest --step") == ["--step-at-most"]
    assert fish("ftckpt latest --level ") == ["content", "structure", "values"]
    # The description of an option is not repeated for each of its values.
    described = offers("ftckpt latest --level ")
    assert [one for one in described if one.partition("\t")[2]] == []
    assert offers("ftckpt latest --step") != ["--step-at-most"]  # it has one itself
    assert fish("ftckpt plan --gpu-m") == ["--gpu-mtbf"]
    assert fish("ftckpt plan sweep --ov") == ["--over"]
    assert fish("ftckpt plan --ov") == []
    assert set(fish("ftckpt plan ")) == {"sweep", "elastic", "compress", "risk"}
    (tmp_path / "run").mkdir()
    assert set(fish("ftckpt gc ")) == {"undelete", "purge", "run/"}
    assert set(fish("ftckpt completions ")) == {"bash", "zsh", "fish"}
