"""`ftckpt diff`, as a user sees it: on the kept root, and on what real frameworks wrote."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ftckpt.commands.app import run
from ftckpt.commands.invocation import Invocation
from ftckpt.errors import ExitCode
from tests.checkpoints import flip
from tests.commands.golden import check_golden, ftckpt
from tests.commands.test_verify import DAMAGE
from tests.json_run import ftckpt_json
from tests.real_sets import real_set
from tests.test_docs import validate

NESTED = "dcp_fsdp2_nested"


def diff(*arguments: str | Path, code: int) -> dict[str, Any]:
    document = ftckpt_json("diff", *map(str, arguments))
    validate(document)
    assert document["result"]["code"] == code, document["result"]
    return document


def test_two_steps(here: Path) -> None:
    check_golden("diff.txt", ftckpt("diff", "run/step-1", "run/step-2", cwd=here))


def test_a_copy_is_known_by_its_crcs_and_full_reads_it(here: Path) -> None:
    shutil.copytree(here / "run/step-2", here / "copy")
    check_golden("diff-equal.txt", ftckpt("diff", "run/step-2", "copy", cwd=here))
    check_golden("diff-full.txt", ftckpt("diff", "run/step-2", "copy", "--full", cwd=here))


def test_sums_alone(here: Path) -> None:
    done = ftckpt("diff", "run/step-1", "run/step-2", "--stat", cwd=here)
    assert done.returncode == 3
    assert "exp_avg_sq" in done.stdout
    assert "1.weight" not in done.stdout
    document = diff(here / "run/step-1", here / "run/step-2", "--stat", code=3)
    assert document["tensors"] == []
    assert document["total"]["counts"] == {"different": 9}


def test_what_sealing_shows_is_not_read(here: Path) -> None:
    shutil.copytree(here / "run/step-2", here / "copy")
    for path in ("run/step-2", "copy"):
        assert ftckpt("seal", path, cwd=here).returncode == 0
    document = diff(here / "run/step-2", here / "copy", code=0)
    assert document["evidence"] == {"manifest": 9}
    assert document["bytes_read"] == 0
    # Damage after sealing has been done to what is not read; --full reads.
    flip(here / "copy/__0_1.distcp", DAMAGE)
    assert diff(here / "run/step-2", here / "copy", code=0)["evidence"] == {"manifest": 9}
    document = diff(here / "run/step-2", here / "copy", "--full", code=3)
    (tensor,) = document["tensors"]
    assert (tensor["key"], tensor["changed"]) == ("exp_avg:0.weight", 1)


def test_a_missing_file_is_4_and_the_rest_is_compared(here: Path) -> None:
    (here / "run/step-2/__0_1.distcp").unlink()
    done = ftckpt("diff", "run/step-1", "run/step-2", cwd=here)
    assert done.returncode == 4
    # One line for all that it befell, and no numbers of what was not read.
    (said,) = [line for line in done.stdout.splitlines() if "missing-file" in line]
    assert re.fullmatch(
        r"error: missing-file \[__0_1\.distcp, \S+ and \d+ more\]: __0_1\.distcp is missing", said
    )
    assert re.search(r"^component +tensors +unread +not equal ", done.stdout, re.MULTILINE)
    document = diff(here / "run/step-1", here / "run/step-2", code=4)
    counts = document["total"]["counts"]
    assert counts["unread"] > 0
    assert counts["different"] > 0
    assert {f["kind"] for f in document["findings"]} == {"missing-file"}
    unread = {t["key"] for t in document["tensors"] if t["status"] == "unread"}
    assert unread <= {f["tensor"] for f in document["findings"]}
    # What could not be read is not said to be missing.
    assert {one["status"] for one in document["state"]} <= {"different"}


def test_a_truncated_file_is_4(here: Path) -> None:
    os.truncate(here / "run/step-2/__0_1.distcp", 20_000)
    document = diff(here / "run/step-1", here / "run/step-2", code=4)
    assert document["total"]["counts"]["unread"] > 0


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["run/step-1", "run"], 2, "is a root"),
        (["run", "run/step-1"], 2, "step-2"),
        (["run/step-1", "run@9"], 9, "9"),
        (["run/step-1", "run/step-2", "--component", "ema"], 9, "they hold exp_avg"),
        (["run/step-1", "run/step-2", "--tensor", "nothing*"], 9, "nothing*"),
        (["run/step-1", "run/step-2", "--plot", "picture.doc"], 2, ".svg or .html file\n"),
        (["run/step-1", "run/step-2", "--rtol", "inf"], 2, "finite"),
        (["run/step-1", "run/step-2", "--rename", "absent.toml"], 2, "absent.toml"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    here: Path, arguments: list[str], code: int, said: str
) -> None:
    done = ftckpt("diff", *arguments, cwd=here)
    assert done.returncode == code
    assert said in done.stderr


def test_a_part_and_tolerances(here: Path) -> None:
    sides = here / "run/step-1", here / "run/step-2"
    assert diff(*sides, "--component", "state", code=3)["total"]["tensors"] == 0
    document = diff(*sides, "--component", "model", code=3)
    assert (document["total"]["tensors"], document["state_fields"]) == (3, 0)
    (tensor,) = diff(*sides, "--tensor", "exp_avg:1.b*", code=3)["tensors"]
    assert (tensor["key"], tensor["beyond"]) == ("exp_avg:1.bias", None)
    document = diff(*sides, "--component", "model", "--atol", "1", code=0)
    assert document["tolerance"] == {"rtol": 0, "atol": 1}
    assert {one["status"] for one in document["tensors"]} == {"close"}
    assert document["result"]["message"].startswith("equal within the tolerances")


def test_other_names(here: Path) -> None:
    (here / "names.toml").write_text('[[rename]]\nfrom = "*.weight"\nto = "w.*"\n')
    back = here / "back.toml"
    back.write_text('[[rename]]\nfrom = "w.*"\nto = "*.weight"\n')
    done = ftckpt("convert", "run/step-1", "st", "--to", "safetensors", "--rename", "names.toml",
                  cwd=here)  # fmt: skip
    assert done.returncode == 0, done.stderr
    plain = diff(here / "st", here / "run/step-1", code=3)
    assert plain["total"]["counts"] == {"missing": 6, "added": 6, "equal": 3}
    tensors = ("--component", "model", "--component", "optimizer")
    diff(here / "st", here / "run/step-1", "--rename", back, *tensors, code=0)


def test_bars_on_a_terminal(here: Path) -> None:
    import pty

    parent, child = pty.openpty()
    command = [sys.executable, "-m", "ftckpt", "diff", "run/step-1", "run/step-2"]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "200", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(command, stdout=child, stderr=subprocess.PIPE, env=environment,
                          cwd=here, timeout=60, check=False)  # fmt: skip
    os.close(child)
    shown = b""
    try:
        while more := os.read(parent, 65536):
            shown += more
    except OSError:  # the other end is closed: the end of the output
        pass
    os.close(parent)
    assert done.returncode == 3
    assert "█".encode() * 20 in shown  # the layer that changed most


def test_a_picture_and_its_numbers(here: Path) -> None:
    sides = here / "run/step-1", here / "run/step-2"
    document = diff(*sides, "--plot", here / "change.svg", code=3)
    assert document["plot"] == {
        "file": str(here / "change.svg"),
        "numbers": str(here / "change.csv"),
    }
    assert "<svg" in (here / "change.svg").read_text()
    with (here / "change.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(r["layer"], r["component"], float(r["relative_l2"])) for r in rows] == [
        (c["layer"], c["part"], c["relative_l2"]) for c in document["cells"]
    ]


def test_a_closed_pipe(here: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [sys.executable, "-m", "ftckpt", "diff", "run/step-1", "run/step-2"],
        stdout=write_end, stderr=subprocess.PIPE, cwd=here, timeout=60, check=False,
    )  # fmt: skip
    os.close(write_end)
    assert (done.returncode, b"Traceback" in done.stderr) == (141, False)


# --- real checkpoints ---------------------------------------------------------------------------


def test_two_steps_of_a_real_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    import numpy as np
    from safetensors.torch import load_file

    folder = real_set(NESTED, "", tmp_path_factory)
    document = diff(folder / "step-3", folder / "step-4", "--full", code=3)
    truth = folder.parent / "truth"
    before, after = (load_file(truth / f"{n}.safetensors") for n in ("state", "state_next"))
    found = {one["key"]: one for one in document["tensors"]}
    checked = 0
    for name in before.keys() & after.keys():
        tensor = found.get(name.removeprefix("model."))
        if tensor is None or tensor["dtype_a"] != "float32":
            continue
        one, two = before[name].numpy(), after[name].numpy()
        a, b = one.astype("g"), two.astype("g")
        assert tensor["changed"] == np.count_nonzero(one.view("u4") != two.view("u4"))
        assert tensor["max_abs"] == pytest.approx(float(np.abs(b - a).max()), rel=1e-12)
        norm = float(np.sqrt(((b - a) ** 2).sum() / (a**2).sum()))
        assert tensor["relative_l2"] == pytest.approx(norm, rel=1e-12)
        cosine = float((a * b).sum() / np.sqrt((a**2).sum() * (b**2).sum()))
        assert tensor["cosine"] == pytest.approx(cosine, rel=1e-12)
        checked += 1
    assert checked > 20
    state = {one["name"]: one for one in document["state"]}
    assert (state["train_state.step"]["a"], state["train_state.step"]["b"]) == ("3", "4")
    assert state["optimizer.param_groups.0.lr"]["about"] == "learning-rate"
    assert state["extra:rng:rank_0.torch_rng_state"]["about"] == "rng-torch"
    loader = state["dataloader.dp_rank_0._sampler_iter_state.samples_yielded"]
    assert (loader["about"], loader["a"], loader["status"]) == ("data", "6", "missing")


@pytest.mark.parametrize(
    "command",
    [
        ["convert", "--to", "safetensors"],
        ["convert", "--to", "torchsave"],
        ["reshard", "--dp", "3"],
    ],
    ids=" ".join,
)
def test_the_same_state_in_other_files_is_equal(
    command: list[str], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source = real_set(NESTED, "step-3", tmp_path_factory)
    verb, *flags = command
    done = ftckpt(verb, source, tmp_path / "out.pt", *flags)
    assert done.returncode == 0, done.stderr
    document = diff(source, tmp_path / "out.pt", code=0)
    assert document["total"]["counts"] == {"equal": 113}
    assert document["state_fields"] == 116


def test_one_state_as_both_of_megatron_s_formats_wrote_it(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    plain = real_set("mcore_torch_tp2pp2", "iter_0000003", tmp_path_factory)
    dist = real_set("mcore_torchdist_tp2pp2", "iter_0000003", tmp_path_factory)
    document = diff(plain, dist, "--component", "model", "--component", "optimizer", code=3)
    # The norms have other names in the two model specifications; all else is the same bit for bit.
    assert document["total"]["counts"] == {"missing": 24, "added": 24, "equal": 57}
    assert document["true_vocab_rows"] == 999
    assert all("norm" in one["key"] for one in document["tensors"])


def test_the_same_weights_by_two_versions_of_transformers(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    sharded = real_set("hf_llama", "", tmp_path_factory)
    pickled = real_set("hf4_llama_bin", "", tmp_path_factory)
    assert diff(sharded, pickled, code=0)["total"]["counts"] == {"equal": 30}


def test_state_that_neither_has_is_not_equal(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({"w": np.ones(3, "f4")}, tmp_path / f"{name}.safetensors")
    words = ["diff", f"{tmp_path}/a.safetensors", f"{tmp_path}/b.safetensors"]
    assert run(words, Invocation()).code is ExitCode.OK
    assert run([*words, "--component", "state"], Invocation()).code is ExitCode.NOT_FOUND


def test_tensors_of_a_file_that_cannot_be_read_are_not_missing(tmp_path: Path) -> None:
    for side in ("a", "b"):
        (tmp_path / side).mkdir()
        for n in (1, 2):
            shard = tmp_path / side / f"model-0000{n}-of-00002.safetensors"
            save_file({f"w{n}.{i}": np.ones(8, np.float32) for i in "xy"}, shard)
        shards = {f"w{n}.{i}": f"model-0000{n}-of-00002.safetensors" for n in (1, 2) for i in "xy"}
        index = tmp_path / side / "model.safetensors.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    cut = tmp_path / "a" / "model-00002-of-00002.safetensors"
    cut.write_bytes(cut.read_bytes()[:-40])
    for words in (["a", "b"], ["b", "a"]):
        done = ftckpt("diff", *words, cwd=tmp_path)
        assert done.returncode == ExitCode.CORRUPT, done.stdout + done.stderr
        assert "error: truncated-file [a/model-00002-of-00002.safetensors" in done.stdout
    done = ftckpt("diff", "a", "b", "--tensor", "w1.*", cwd=tmp_path)
    assert done.returncode == ExitCode.OK, done.stderr
    done = ftckpt("inspect", "a", cwd=tmp_path)
    assert done.returncode == ExitCode.OK
    assert "error: truncated-file [model-00002-of-00002.safetensors" in done.stdout
    assert "`ftckpt verify` says all" in done.stderr
