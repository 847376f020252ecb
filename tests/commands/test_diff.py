"""`ftckpt diff`, as a user sees it: on the kept root, and on what real frameworks wrote."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ftckpt.commands.cli.app import run
from ftckpt.commands.cli.invocation import Invocation
from ftckpt.errors import ExitCode
from tests.builders.checkpoints import flip, open_checkpoint
from tests.builders.real_sets import real_set
from tests.commands.golden import check_golden, ftckpt
from tests.commands.test_verify import DAMAGE
from tests.json_run import ftckpt_json
from tests.test_docs import validate

NESTED = "dcp_fsdp2_nested"


def diff(*arguments: str | Path, code: int) -> dict[str, Any]:
    document = ftckpt_json("diff", *map(str, arguments))
    validate(document)
    assert document["result"]["code"] == code, document["result"]
    return document


def test_two_steps(here: Path) -> None:
    check_golden("diff.txt", ftckpt("diff", "run/step-1", "run/step-2", cwd=here))


def test_a_copy_is_read_and_its_crcs_are_trusted_on_request_alone(here: Path) -> None:
    shutil.copytree(here / "run/step-2", here / "copy")
    check_golden("diff-equal.txt", ftckpt("diff", "run/step-2", "copy", cwd=here))
    trusting = ("diff", "run/step-2", "copy", "--trust-recorded")
    check_golden("diff-recorded.txt", ftckpt(*trusting, cwd=here))
    document = diff(here / "run/step-2", here / "copy", "--trust-recorded", code=0)
    assert document["trust_recorded"]
    assert document["total"]["counts"] == {"recorded as equal": 9}
    assert {one["status"] for one in document["tensors"]} == {"recorded as equal"}
    assert document["result"]["message"].startswith("recorded as equal and not read: 9 tensors")
    # A variable of the environment never skips a check; who sets one believes that it does.
    done = ftckpt("diff", "run/step-2", "copy", cwd=here, FTCKPT_DIFF_TRUST_RECORDED="1")
    assert done.returncode == 2
    assert "sets no option" in done.stderr


def test_a_damaged_record_is_named_also_where_both_are_damaged_alike(here: Path) -> None:
    shutil.copytree(here / "run/step-2", here / "copy")
    flip(here / "copy/__0_1.distcp", DAMAGE)
    for order in (("run/step-2", "copy"), ("copy", "run/step-2")):
        document = diff(*(here / one for one in order), code=4)
        (found,) = document["findings"]
        assert (found["kind"], found["tensor"]) == ("bad-crc", "exp_avg:0.weight")
        assert found["file"] == str(here / "copy/__0_1.distcp")
        assert document["total"]["counts"] == {"equal": 8, "different": 1}
        assert document["result"]["message"].startswith("damaged: exp_avg:0.weight")
    shutil.copytree(here / "copy", here / "other")
    document = diff(here / "other", here / "copy", code=4)
    assert document["total"]["counts"] == {"equal": 9}
    assert [Path(f["file"]).parent.name for f in document["findings"]] == ["other", "copy"]
    # Who trusts what is recorded is told so, and sees nothing of it.
    document = diff(here / "run/step-2", here / "copy", "--trust-recorded", code=0)
    assert document["total"]["counts"] == {"recorded as equal": 9}
    # What was not asked for is not checked.
    diff(here / "other", here / "copy", "--component", "model", code=0)


@pytest.mark.parametrize(
    ("name", "inside"),
    [
        ("accelerate_fsdp1", "checkpoint_3/pytorch_model_fsdp_0"),
        ("accelerate_fsdp2", "checkpoint_3/optimizer_0"),
        ("dcp_2d_tpfsdp", "step-3"),
        ("ds_z2_w2_bf16", "global_step3"),
        ("ds_z3_w2_fp32", "global_step3"),
        ("hf4_llama_bin", ""),
        ("lightning_ddp", "last.ckpt"),
        ("mcore0161_tp2dp2_dpreshard", "iter_0000003"),
        ("mcore_torch_tp2pp2", "iter_0000003"),
        ("mcore_torchdist_tp2pp2", "iter_0000003"),
        ("verl_fsdp", "global_step_3"),
    ],
)
def test_damage_in_any_format_is_named(
    name: str, inside: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source = real_set(name, inside, tmp_path_factory)
    one, two = tmp_path / f"one{source.suffix}", tmp_path / f"two{source.suffix}"
    for path in (one, two):
        (shutil.copytree if source.is_dir() else shutil.copyfile)(source, path)
    diff(one, two, code=0)
    checkpoint = open_checkpoint(two)
    # The last byte of the largest record that a tensor lies in: in some formats it is padding.
    owned = {key for key in checkpoint.tensors if key not in checkpoint.aliases.values()}
    record = max(
        (r for r in checkpoint.records() if r.owner in owned and not r.transforms),
        key=lambda r: (r.extent.length, r.extent),
    )
    file = two / record.extent.file if two.is_dir() else two
    flip(file, record.extent.end - 1)
    document = diff(one, two, code=4)
    (found,) = [f for f in document["findings"] if f["severity"] == "error"]
    assert (found["kind"], found["file"]) == ("bad-crc", str(file))


def test_sums_alone(here: Path) -> None:
    done = ftckpt("diff", "run/step-1", "run/step-2", "--top", "0", cwd=here)
    assert done.returncode == 3
    assert "exp_avg_sq" in done.stdout
    assert "1.weight" not in done.stdout
    document = diff(here / "run/step-1", here / "run/step-2", "--top", "0", code=3)
    assert document["tensors"] == []
    assert document["total"]["counts"] == {"different": 9}


def test_what_sealing_records_is_trusted_on_request(here: Path) -> None:
    shutil.copytree(here / "run/step-2", here / "copy")
    for path in ("run/step-2", "copy"):
        assert ftckpt("seal", path, cwd=here).returncode == 0

    def recorded() -> dict[str, Any]:
        return diff(here / "run/step-2", here / "copy", "--trust-recorded", code=0)

    assert recorded()["evidence"] == {"manifest": 9}
    # Damage after sealing has been done to what is not read then.
    flip(here / "copy/__0_1.distcp", DAMAGE)
    assert recorded()["evidence"] == {"manifest": 9}
    document = diff(here / "run/step-2", here / "copy", code=4)
    (tensor,) = document["tensors"]
    assert (tensor["key"], tensor["changed"]) == ("exp_avg:0.weight", 1)
    assert {f["kind"] for f in document["findings"]} == {"bad-crc", "bad-digest"}


def test_a_seal_names_the_damaged_one_where_there_is_no_crc(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    save_file({"a": np.zeros(9, "f4"), "b": np.ones(9, "f4")}, whole / "model.safetensors")
    copy = shutil.copytree(whole, tmp_path / "copy")
    for path in (whole, copy):
        assert ftckpt("seal", path).returncode == 0
    flip(copy / "model.safetensors", (copy / "model.safetensors").stat().st_size - 1)
    document = diff(whole, copy, code=4)
    (found,) = document["findings"]
    assert (found["kind"], found["file"]) == ("bad-digest", str(copy / "model.safetensors"))
    assert document["total"]["counts"] == {"equal": 1, "different": 1}
    # Without the seals nothing says that it is damage.
    for path in (whole, copy):
        (path / "ftckpt.manifest.json").unlink()
    diff(whole, copy, code=3)


def test_a_seal_names_damaged_state_where_there_is_no_crc(tmp_path: Path, here: Path) -> None:
    whole = tmp_path / "whole"
    done = ftckpt("convert", here / "run/step-2", whole, "--to", "safetensors")
    assert done.returncode == 0, done.stderr
    copy = shutil.copytree(whole, tmp_path / "copy")
    diff(whole, copy, code=0)
    for path in sorted(copy.rglob("*")):
        data = path.read_bytes() if path.is_file() else b""
        if b"G?" in data:  # a float of a pickle
            flip(path, data.index(b"G?") + 5)
            break
    else:
        pytest.fail("no object with a float")
    document = diff(whole, copy, code=4)
    assert {f["kind"] for f in document["findings"]} <= {"bad-digest", "bad-crc"}
    assert not any(f["file"].startswith(str(whole)) for f in document["findings"])


def test_damage_in_deltas_is_named(tmp_path: Path, here: Path) -> None:
    one = tmp_path / "one"
    done = ftckpt("delta", "pack", here / "run/step-1", here / "run/step-2", one)
    assert done.returncode == 0, done.stderr
    document = diff(one, here / "run/step-2", code=0)
    assert document["evidence"] == {"read": 9}
    assert diff(one, one, "--trust-recorded", code=0)["evidence"] == {"digest": 9}
    for name in ("00000.blocks", "objects.records"):
        two = shutil.copytree(one, tmp_path / name)
        # Anywhere in it: what the bytes decode to may be the same all the same.
        for share in (0.1, 0.5, 0.9):
            place = int((two / name).stat().st_size * share)
            flip(two / name, place)
            document = diff(one, two, code=4)
            assert {f["kind"] for f in document["findings"]} <= {"bad-digest", "bad-delta"}
            flip(two / name, place)
        diff(one, two, code=0)


def test_a_missing_file_is_4_and_the_rest_is_compared(here: Path) -> None:
    (here / "run/step-2/__0_1.distcp").unlink()
    done = ftckpt("diff", "run/step-1", "run/step-2", cwd=here)
    assert done.returncode == 4
    # One line for all that it befell, and no numbers of what was not read.
    (said,) = [line for line in done.stdout.splitlines() if "missing-file" in line]
    assert re.fullmatch(
        r"error: missing-file \[\S+ and \d+ more\]: run/step-2/__0_1\.distcp is missing", said
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
        (["run/step-1", "run/step-2", "--rtol", "inf"], 2, "takes a number from 0"),
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
    document = diff(folder / "step-3", folder / "step-4", code=3)
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


MEGATRON = [
    ("mcore_torch_tp2pp2", ["--tp", "1", "--pp", "1"]),
    ("mcore_torch_tp2pp2", ["--tp", "4", "--pp", "1"]),
    ("mcore_torch_tp2pp2", ["--tp", "1", "--pp", "2"]),
    ("mcore_torch_tp2dp2_distopt_bf16", ["--tp", "1", "--dp", "1"]),
    ("mcore_torch_tp2dp2_distopt_bf16", ["--tp", "4", "--dp", "1"]),
    ("mcore_torch_tp2dp2_distopt_bf16", ["--tp", "2", "--dp", "4"]),
    ("mcore_torchdist_tp2pp2", ["--tp", "1", "--pp", "1"]),
    ("mcore_torchdist_tp2pp2", ["--tp", "4", "--pp", "1"]),
    ("mcore_torchdist_tp2dp2_fullyreshard_bf16", ["--tp", "1", "--dp", "1"]),
    ("mcore0161_tp2dp2_dpreshard", ["--tp", "4", "--dp", "1"]),
    ("mcore0161_tp2dp2_dpreshard", ["--tp", "1", "--dp", "1"]),
]
OTHERS = [
    ("ds_z1_w4_bf16", "global_step3", ["--dp", "2"]),
    ("ds_z2_w2_bf16", "global_step3", ["--dp", "4"]),
    ("ds_z2_w2_bf16", "global_step3", ["--dp", "1"]),
    ("ds_z3_w2_fp32", "global_step3", ["--dp", "4"]),
    ("ds_pp2dp2_z1_bf16", "global_step2", ["--pp", "2", "--dp", "1"]),
    ("verl_fsdp", "global_step_3", ["--dp", "2", "--only", "model"]),
    ("dcp_fsdp2_nested", "step-3", ["--dp", "3"]),
    ("dcp_2d_tpfsdp", "step-3", ["--dp", "2"]),
    ("dcp_fsdp2_titan", "step-3", ["--dp", "2"]),
    ("accelerate_fsdp1", "checkpoint_3/pytorch_model_fsdp_0", ["--dp", "4"]),
]


@pytest.mark.parametrize(
    ("name", "inside", "grid"),
    [*((name, "iter_0000003", grid) for name, grid in MEGATRON), *OTHERS],
    ids=str,
)
def test_a_resharded_copy_is_equal(
    name: str,
    inside: str,
    grid: list[str],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    source = real_set(name, inside, tmp_path_factory)
    done = ftckpt("reshard", source, tmp_path / "copy", *grid)
    assert done.returncode == 0, done.stderr
    choice = ["--component", "model"] if "--only" in grid else []
    document = diff(source, tmp_path / "copy", *choice, code=0)
    assert set(document["total"]["counts"]) == {"equal"}
    assert all(field["layout"] for field in document["state"])
    if name.startswith("mcore"):
        sizes = {field["name"] for field in document["state"]}
        assert sizes & {"args.tensor_model_parallel_size", "args.data_parallel_size"}
        assert "follow the grid of ranks differ" in document["result"]["message"]
        document = diff(source, tmp_path / "copy", "--layout-state", code=3)
        assert document["layout_counts"]


def test_a_true_change_beside_another_grid_is_a_difference(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    name = "mcore_torch_tp2pp2"
    source = real_set(name, "iter_0000003", tmp_path_factory)
    done = ftckpt("reshard", source, tmp_path / "copy", "--tp", "1", "--pp", "1")
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "copy").rglob("model_optim_rng.pt")
    replace_floats(file, 0.001, 0.002)
    for path in (tmp_path / "copy").glob("ftckpt.manifest.json"):
        path.unlink()
    document = diff(source, tmp_path / "copy", code=3)
    changed = {field["name"]: field for field in document["state"] if not field["layout"]}
    assert {field["about"] for field in changed.values()} >= {"learning-rate"}
    assert "args.lr" in changed
    assert not {name for name in changed if "parallel" in name or "rng" in name}


def replace_floats(path: Path, old: float, new: float) -> None:
    """Put another float into every place of the pickle of a torch.save file."""
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        (member,) = (m for m in archive.infolist() if m.filename.endswith("/data.pkl"))
        directory = archive.start_dir
    head = member.header_offset
    start = head + 30 + sum(int.from_bytes(data[head + n : head + n + 2], "little")
                            for n in (26, 28))  # fmt: skip
    end = start + member.file_size
    was, now = (b"G" + struct.pack(">d", value) for value in (old, new))
    tree = bytes(data[start:end]).replace(was, now)
    assert tree != data[start:end]
    data[start:end] = tree
    before, after = (x.to_bytes(4, "little") for x in (member.CRC, zlib.crc32(tree)))
    at = data.index(before, directory)
    data[at : at + 4] = after
    for place in (head + 14, end + 4):  # the local header, or the descriptor behind the bytes
        if data[place : place + 4] == before:
            data[place : place + 4] = after
    path.write_bytes(data)


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
        assert re.search(
            r"error: truncated-file .*: a/model-00002-of-00002\.safetensors ", done.stdout
        )
    done = ftckpt("diff", "a", "b", "--tensor", "w1.*", cwd=tmp_path)
    assert done.returncode == ExitCode.OK, done.stderr
    done = ftckpt("inspect", "a", cwd=tmp_path)
    assert done.returncode == ExitCode.OK
    assert re.search(r"error: truncated-file .*: model-00002-of-00002\.safetensors ", done.stdout)
    assert "`ftckpt verify` says all" in done.stderr
