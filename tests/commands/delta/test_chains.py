"""`ftckpt delta info` and `ftckpt delta rebase` as a user runs them, on two real checkpoints."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import ftckpt as api
from ftckpt.delta.pack.assemble import PackOptions
from ftckpt.errors import ExitCode
from ftckpt.formats.delta.pack import pack_checkpoint
from ftckpt.storage import StoreOptions
from tests.builders.checkpoints import open_checkpoint
from tests.commands.golden import RUN, check_golden, ftckpt
from tests.delta.on_disk import pack_delta, state_at
from tests.test_docs import validate

# A column is as wide as the path of a directory that differs from run to run.
_RULE = re.compile(r"-{13,}$", re.MULTILINE)


def pack(base: Path, target: Path, out: Path) -> None:
    pack_checkpoint(
        open_checkpoint(target),
        open_checkpoint(base),
        str(out),
        options=PackOptions(),
        store_options=StoreOptions(),
    )


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `run/step-1`, and two deltas based on it, one based on the other."""
    place = tmp_path_factory.mktemp("chains")
    shutil.copytree(RUN, place / "run")
    pack(place / "run/step-1", place / "run/step-2", place / "two")
    pack(place / "two", place / "run/step-1", place / "three")
    shutil.rmtree(place / "run/step-2")
    return place


@pytest.fixture
def chain(packed: Path, tmp_path: Path) -> Path:
    """A copy of `packed` that a test may change."""
    return Path(shutil.copytree(packed, tmp_path / "here"))


@pytest.fixture
def tensors(here: Path) -> Path:
    """The same chain of the tensors alone: what info says of them does not hang on other state."""
    for base, target, step in (("run/step-1", "run/step-2", 2), ("two", "run/step-1", 1)):
        state = state_at(open_checkpoint(here / target))
        pack_delta(here / ("two", "three")[2 - step], state, here / base, step=step)
    return here


def placed(done: subprocess.CompletedProcess[str], here: Path) -> subprocess.CompletedProcess[str]:
    """Return a run with the directory's own name taken out of what it printed."""
    done.stdout, done.stderr = (t.replace(f"{here}/", "") for t in (done.stdout, done.stderr))
    done.stdout = _RULE.sub("-" * 12, done.stdout)
    return done


def answer(*arguments: str, cwd: Path) -> dict[str, Any]:
    done = ftckpt("delta", *arguments, "--json", cwd=cwd)
    document: dict[str, Any] = json.loads(done.stdout)
    assert document["result"]["code"] == done.returncode, document["result"]
    validate(document)
    return document


def equal(a: Path, b: Path) -> bool:
    return api.diff(str(a), str(b)).code is ExitCode.OK


def test_info_shows_the_chain(tensors: Path) -> None:
    done = ftckpt("delta", "info", "three", cwd=tensors)
    check_golden("delta-info.txt", placed(done, tensors))


def test_info_shows_how_far_a_broken_chain_goes(tensors: Path) -> None:
    (tensors / "run" / "step-1").rename(tensors / "away")
    done = ftckpt("delta", "info", "three", cwd=tensors)
    check_golden("delta-info-broken.txt", placed(done, tensors))


def test_info_as_json(chain: Path) -> None:
    document = answer("info", "three", cwd=chain)
    assert [link["format"] for link in document["chain"]] == ["delta", "delta", "dcp"]
    assert [link["identity"] for link in document["chain"]] == ["itself", "content", "likely"]
    restore = document["restore"]
    assert restore["bytes_read"] == sum(link["read"] for link in document["chain"])
    assert restore["blocks"] == sum(link["blocks"] for link in document["chain"])
    # Step 1 is stored as what it adds to what was added to it.
    assert document["step"] == 1
    assert document["base"]["step"] == 2
    assert document["base"]["path"] == "../two"
    assert document["broken"] is None
    assert document["ratio"] == document["chain"][0]["ratio"] > 0


def test_a_base_that_is_sealed_is_known_by_its_manifest(here: Path) -> None:
    api.seal(str(here / "run/step-1"))
    pack(here / "run/step-1", here / "run/step-2", here / "two")
    document = answer("info", "two", cwd=here)
    assert [link["identity"] for link in document["chain"]] == ["itself", "manifest"]


def test_info_of_a_broken_chain(chain: Path) -> None:
    (chain / "run" / "step-1").rename(chain / "away")
    document = answer("info", "three", cwd=chain)
    assert document["result"]["code"] == 9
    assert (document["broken"]["kind"], len(document["chain"])) == ("missing-base", 2)
    found = answer("info", "three", "--base", "away", cwd=chain)
    assert (found["result"]["code"], len(found["chain"])) == (0, 3)


def test_info_of_a_wrong_base(chain: Path) -> None:
    shutil.rmtree(chain / "two")
    shutil.copytree(chain / "three", chain / "two")
    document = answer("info", "three", cwd=chain)
    assert document["result"]["code"] == 4
    assert document["broken"]["kind"] == "wrong-base"


def test_advice_from_measured_rates(chain: Path) -> None:
    document = answer("info", "three", "--advise", "--storage-bw", "1MB/s", cwd=chain)
    assert all(rate > 0 for rate in document["rates"].values())
    assert document["advice"]["sentence"]
    done = ftckpt("delta", "info", "three", "--advise", cwd=chain)
    assert done.returncode == 0
    assert "measured with" in done.stdout
    assert "--storage-bw" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["info", "run/step-1"], "is not a delta but dcp"),
        (["info", "three", "--storage-bw", "1GB/s"], "is for the advice"),
        (["rebase", "run/step-1", "x"], "is not a delta but dcp"),
        (["rebase", "two", "x"], "directly on a full checkpoint"),
    ],
)
def test_usage(packed: Path, arguments: list[str], message: str) -> None:
    document = answer(*arguments, cwd=packed)
    assert document["result"]["code"] == 2
    assert message in document["result"]["message"]


def test_rebase_shortens_a_chain(chain: Path) -> None:
    document = answer("rebase", "three", "short", cwd=chain)
    assert document["result"]["code"] == 0
    # Step 1 against step 1: nothing is left of its tensors.
    assert list(document["methods"]) == ["equal"]
    assert document["content"] == answer("info", "three", cwd=chain)["content"]
    shutil.rmtree(chain / "two")
    assert api.verify(str(chain / "short"), level="content").code is ExitCode.OK
    assert equal(chain / "short", chain / "run/step-1")
    links = answer("info", "short", cwd=chain)["chain"]
    assert [link["base"] for link in links] == ["../run/step-1", None]


def test_rebase_makes_a_delta_full(chain: Path) -> None:
    document = answer("rebase", "three", "full", "--onto", "none", cwd=chain)
    assert (document["result"]["code"], document["base"]) == (0, None)
    shutil.rmtree(chain / "two")
    reference = (chain / "run" / "step-1").rename(chain / "reference")
    assert equal(chain / "full", reference)
    done = ftckpt("delta", "unpack", "full", "back", cwd=chain)
    assert done.returncode == 0, done.stderr
    assert equal(chain / "back", reference)


def test_rebase_onto_another(chain: Path) -> None:
    other = Path(shutil.copytree(chain / "run" / "step-1", chain / "other"))
    document = answer("rebase", "two", "moved", "--onto", "other", cwd=chain)
    assert (document["result"]["code"], document["base"]) == (0, "other")
    shutil.rmtree(chain / "run")
    assert open_checkpoint(chain / "moved").step == 2
    assert not equal(chain / "moved", other)


def test_every_verb_reads_a_chain(chain: Path) -> None:
    for arguments in (
        ("inspect", "three"),
        ("verify", "three", "--level", "values"),
        ("diff", "three", "run/step-1"),
        ("reshard", "three", "resharded", "--dp", "2"),
        ("convert", "three", "converted", "--to", "safetensors"),
        ("seal", "two"),
        ("replay", "audit", "three"),
        ("copy", "three", "copied"),
    ):
        done = ftckpt(*arguments, cwd=chain)
        assert done.returncode == 0, (arguments, done.stderr)
    for result in ("resharded", "converted", "copied"):
        assert equal(chain / result, chain / "run/step-1")


def test_a_root_of_deltas(chain: Path) -> None:
    root = chain / "root"
    root.mkdir()
    for place, name in (("run/step-1", "step-1"), ("two", "step-2")):
        (chain / place).rename(root / name)
    latest = ftckpt("latest", "root", "--level", "content", cwd=chain)
    # The delta's base has another name now, in its own root: it is found by its step.
    assert latest.stdout.strip().endswith("step-2")
    planned = ftckpt("gc", "root", "--keep-last", "1", "--min-survivors", "1", cwd=chain)
    assert planned.returncode == 0, planned.stderr
    assert "depends on it" in planned.stdout
