"""`ftckpt delta pack` and `ftckpt delta unpack` as a user runs them."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.commands.golden import check_golden, ftckpt
from tests.json_run import ftckpt_json
from tests.test_docs import validate

ONE, TWO = "run/step-1", "run/step-2"


def _bytes(path: Path) -> Mapping[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def test_pack_says_what_became_of_each_part(here: Path) -> None:
    before = _bytes(here / "run")
    done = ftckpt("delta", "pack", ONE, TWO, "out", cwd=here)
    done.stderr = done.stderr.replace(f"{here}/", "")
    check_golden("delta-pack.txt", done)
    assert _bytes(here / "run") == before
    assert sorted(os.listdir(here)) == ["out", "run"]
    done = ftckpt("verify", "out", "--level", "content", cwd=here)
    assert done.returncode == 0, done.stderr
    same = ftckpt("diff", "out", TWO, "--top", "0", cwd=here)
    assert same.returncode == 0, same.stdout


def test_pack_without_a_base(here: Path) -> None:
    check_golden("delta-pack-whole.txt", ftckpt("delta", "pack", TWO, "out", cwd=here))
    again = ftckpt("delta", "pack", TWO, "out", cwd=here)
    assert again.returncode == 8, again.stderr


def test_unpack_shows_the_digest_of_what_was_packed(here: Path) -> None:
    packed = ftckpt_json("delta", "pack", str(here / ONE), str(here / TWO), str(here / "delta"))
    validate(packed)
    check_golden("delta-unpack.txt", ftckpt("delta", "unpack", "delta", "back", cwd=here))
    same = ftckpt("diff", "back", TWO, cwd=here)
    assert same.returncode == 0, same.stdout
    other = ftckpt_json(
        "delta", "unpack", str(here / "delta"), str(here / "hf"), "--to", "safetensors"
    )
    validate(other)
    assert other["content"] == packed["content"]
    assert other["proof"]["tensors"] == packed["tensors"]
    repacked = ftckpt_json("delta", "pack", str(here / "hf"), str(here / "whole"), "--level", "3")
    validate(repacked)
    assert (repacked["content"], repacked["base"]) == (packed["content"], None)


def test_a_base_that_has_moved(here: Path) -> None:
    assert ftckpt("delta", "pack", ONE, TWO, "delta", cwd=here).returncode == 0
    (here / "run").rename(here / "elsewhere")
    lost = ftckpt("delta", "unpack", "delta", "back", cwd=here)
    assert lost.returncode == 9, lost.stderr
    assert "--base" in lost.stderr
    wrong = ftckpt("delta", "unpack", "delta", "back", "--base", "elsewhere/step-2", cwd=here)
    assert wrong.returncode == 4, wrong.stderr
    assert sorted(os.listdir(here)) == ["delta", "elsewhere"]
    found = ftckpt("delta", "unpack", "delta", "back", "--base", "elsewhere/step-1", cwd=here)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["pack", TWO], 2, "three, TARGET OUT two"),
        (["pack", ONE, TWO, "out", "more"], 2, "4 places given"),
        (["pack", "run", "out"], 2, "is a root"),
        (["pack", "run", TWO, "out"], 2, "is a root"),
        (["pack", ONE, "run/step-9", "out"], 9, "step-9"),
        (["pack", "run/step-9", TWO, "out"], 9, "step-9"),
        (["pack", TWO, "out", "--rename", "names.toml"], 2, "there is none"),
        (["pack", TWO, "out", "--level", "4"], 2, "--level"),
        (["pack", TWO, "out", "--max-memory", "16MiB"], 12, "--max-memory"),
        (["unpack", TWO, "out"], 2, "is not a delta but dcp"),
        (["unpack", TWO, "out", "--to", "nothing"], 2, "is not a format"),
        (["unpack", TWO, "out", "--to", "bundle"], 13, "are not written"),
    ],
)
def test_refusals(here: Path, words: list[str], code: int, said: str) -> None:
    done = ftckpt("delta", *words, cwd=here)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert os.listdir(here) == ["run"]


def test_advice_for_a_given_storage(here: Path) -> None:
    document: dict[str, Any] = ftckpt_json(
        "delta", "pack", str(here / ONE), str(here / TWO), str(here / "out"),
        "--storage-bw", "100KB/s",
    )  # fmt: skip
    validate(document)
    assert document["advice"]["pays"] is (document["ratio"] > 1)
    assert document["advice"]["sentence"]
    assert document["bytes_in"] / document["bytes_out"] == document["ratio"]
    parts = document["components"].values()
    assert sum(part["bytes_in"] for part in parts) == document["bytes_in"]
    stored = sum(part["bytes_out"] for part in parts)
    assert stored + document["index_bytes"] == document["bytes_out"]


def test_names_that_differ(here: Path) -> None:
    table = here / "names.toml"
    table.write_text('[[rename]]\nfrom = "*"\nto = "net.*"\n')
    done = ftckpt("convert", ONE, "named", "--to", "safetensors", "--rename", table, cwd=here)
    assert done.returncode == 0, done.stderr
    table.write_text('[[rename]]\nfrom = "net.*"\nto = "*"\n')
    plain, renamed = (
        ftckpt("delta", "pack", "named", TWO, out, *more, cwd=here)
        for out, more in (("plain", []), ("renamed", ["--rename", str(table)]))
    )
    # A base whose names nothing of it has is another's, and is needed all the same.
    assert "warning: nothing in it is told by named, and it needs that" in plain.stderr
    assert "warning" not in renamed.stderr
    sizes = [sum(map(len, _bytes(here / out).values())) for out in ("renamed", "plain")]
    assert sizes[0] < sizes[1]


def test_a_base_that_gc_would_not_know_to_keep(here: Path) -> None:
    """What lies beside its base is seen by gc of both; of a delta elsewhere gc cannot know."""
    beside = ftckpt("delta", "pack", "run/step-1", "run/step-2", "run/delta-2", cwd=here)
    assert beside.returncode == 0
    assert "gc of" not in beside.stderr
    away = ftckpt("delta", "pack", "run/step-1", "run/step-2", "away", cwd=here)
    (said,) = (line for line in away.stderr.splitlines() if line.startswith("gc of"))
    command = shlex.split(said.partition(": ")[2].removesuffix(" keeps it"))
    done = ftckpt(*command[1:], cwd=here)
    assert done.returncode == 0, done.stderr
    rows = json.loads(ftckpt("ls", "run", "--json", cwd=here).stdout)["checkpoints"]
    assert [pin["entry"] for row in rows for pin in row["pins"]] == ["step-1"]
