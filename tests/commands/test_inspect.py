"""`ftckpt inspect`, as a user sees it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import ftckpt as api
from tests.commands.golden import check_golden, ftckpt
from tests.commands.saves import answer
from tests.faults.test_semantic import placed


def test_the_other_state_is_listed(here: Path) -> None:
    done = ftckpt("inspect", "run/step-1", "--objects", cwd=here)
    assert done.returncode == 0
    assert "other state " in done.stdout
    document = answer("inspect", str(here / "run/step-1"), "--objects")
    listed = document["object_list"]
    assert len(listed) == document["objects"] > 0
    assert all(one["name"] in done.stdout for one in listed)
    assert all((here / "run/step-1" / one["file"]).is_file() for one in listed)


def test_a_checkpoint(here: Path) -> None:
    check_golden("inspect.txt", ftckpt("inspect", "run/step-2", cwd=here))


def test_a_root_lists_its_checkpoints_and_shows_the_newest(here: Path) -> None:
    check_golden("inspect-root.txt", ftckpt("inspect", "run", cwd=here))


def test_tensors_and_files(here: Path) -> None:
    done = ftckpt("inspect", "run@1", "--tensors", "--files", cwd=here)
    check_golden("inspect-lists.txt", done)


def test_one_tensor_is_found_by_parameter_name_with_its_moments(here: Path) -> None:
    check_golden("inspect-tensor.txt", ftckpt("inspect", "run@1", "--tensor", "1.bias", cwd=here))


def test_one_tensor_is_found_by_key(here: Path) -> None:
    done = ftckpt("inspect", "run@1", "--tensor", "exp_avg:1.bias", "--json", cwd=here)
    assert done.returncode == 0
    (record,) = json.loads(done.stdout)["tensor"]
    assert record["kind"] == "exp_avg"
    assert record["shape"] == [8]
    assert record["pieces"][0]["sizes"] == [8]


def test_an_unknown_tensor_is_not_found(here: Path) -> None:
    done = ftckpt("inspect", "run@1", "--tensor", "nope", cwd=here)
    assert done.returncode == 9
    assert "nope" in done.stderr
    assert done.stdout == ""


def test_json_says_what_the_contract_says(here: Path) -> None:
    document = json.loads(ftckpt("inspect", "run/step-2", "--json", "--tensors", cwd=here).stdout)
    assert document["schema"] == "ftckpt.inspect/1"
    assert document["format"] == "dcp"
    assert document["step"] == 2
    assert document["world_size"] == 1
    assert document["bytes"]["by_kind"]["param"] == 648 * 4
    assert document["tensors"]["count"] == 13
    assert len(document["tensors"]["list"]) == 13
    resume = {item["key"]: item["presence"] for item in document["resume"]}
    assert resume["weights"] == resume["moments"] == "present"
    assert document["result"] == {
        "code": 0,
        "name": "OK",
        "message": "dcp, step 2: 13 tensors in 3 files",
        "hint": "",
    }


def test_state_that_is_named_and_lost_is_told_with_the_resume_check(tmp_path: Path) -> None:
    place = placed("deepspeed/z1/global_step2", tmp_path)
    whole = answer("inspect", str(place), "--resume")
    assert not [note for note in whole["notes"] if note["severity"] == "error"]
    (place / "bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt").unlink()
    torn = answer("inspect", str(place), "--resume")
    assert "missing-rank" in {n["kind"] for n in torn["notes"] if n["severity"] == "error"}
    assert torn["result"]["code"] == 0  # the verdict is that of verify
    by_call = api.inspect(str(place), resume=True).notes
    assert [note.message for note in by_call] == [note["message"] for note in torn["notes"]]


def test_no_tensor_byte_is_read(here: Path) -> None:
    # With every data file cut to nothing the headers of none of them can be read: what inspect
    # says of tensors must come from the metadata alone.
    whole = json.loads(ftckpt("inspect", "run/step-2", "--json", cwd=here).stdout)
    for path in (here / "run/step-2").glob("*.distcp"):
        path.write_bytes(b"")
    cut = json.loads(ftckpt("inspect", "run/step-2", "--json", cwd=here).stdout)
    assert cut["result"]["code"] == 0
    assert cut["tensors"] == whole["tensors"]
    assert cut["bytes"]["total"] == whole["bytes"]["total"]
    assert (cut["step"], cut["step_by"]) == (2, "name")


def test_uncommitted(here: Path) -> None:
    (here / "run/step-2/.metadata").unlink()
    check_golden("inspect-uncommitted.txt", ftckpt("inspect", "run/step-2", cwd=here))


def test_damaged_metadata(here: Path) -> None:
    path = here / "run/step-2/.metadata"
    path.write_bytes(path.read_bytes()[:-100])
    check_golden("inspect-damaged.txt", ftckpt("inspect", "run/step-2", cwd=here))


def test_hostile_metadata_runs_nothing(here: Path) -> None:
    canary = here / "canary"
    payload = b"cposix\nsystem\n(S'touch " + os.fsencode(canary) + b"'\ntR."
    (here / "run/step-2/.metadata").write_bytes(payload)
    done = ftckpt("inspect", "run/step-2", cwd=here)
    assert done.returncode == 7
    assert "posix.system" in done.stderr
    assert not canary.exists()


def test_metadata_that_needs_more_memory_than_allowed_is_refused(here: Path) -> None:
    done = ftckpt("inspect", "run/step-2", "--max-memory", "20KiB", cwd=here)
    assert done.returncode == 12
    assert "--max-memory" in done.stderr


@pytest.mark.s3
def test_on_s3_with_requests_counted(here: Path, s3_url: str) -> None:
    from ftckpt.storage import open_store

    store = open_store(s3_url)
    for path in sorted((here / "run").rglob("*")):
        if path.is_file():
            store.put(path.relative_to(here / "run").as_posix(), path.read_bytes())
    done = ftckpt("inspect", f"{s3_url}/step-2", "--json")
    document = json.loads(done.stdout)
    assert (done.returncode, document["step"], document["format"]) == (0, 2, "dcp")
    assert 0 < document["requests"] < 60
    assert 0 < document["bytes_read"] < 65536
