"""`ftckpt ls`, `du` and `cat`, as a user sees them."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from tests.commands.golden import RUN, check_golden, ftckpt
from tests.commands.saves import DAY, answer, save

STEP = RUN / "step-1"


def test_ls_says_what_a_root_holds(tmp_path: Path) -> None:
    root = tmp_path / "run"
    for step, age in ((100, 3 * DAY), (200, 2 * DAY), (300, DAY)):
        save(root, f"checkpoint-{step}", age)
    save(root, "checkpoint-250.tmp", 1.5 * DAY)
    (root / "notes.txt").write_text("x")
    (root / "latest").write_text("checkpoint-300")
    assert ftckpt("pin", root, "100", "--reason", "paper", "--owner", "ann").returncode == 0
    assert ftckpt("tag", root, "200", "good").returncode == 0
    done = ftckpt("ls", "run", cwd=tmp_path)
    check_golden("ls.txt", done)
    rows = answer("ls", str(root))["checkpoints"]
    assert [(row["step"], row["sealed"], row["verified"]) for row in rows] == [
        (300, False, False), (250, False, False), (200, False, False), (100, False, False),
    ]  # fmt: skip
    assert rows[1]["class"] == "ABANDONED"
    assert (rows[0]["pointers"], rows[2]["tags"]) == (["latest"], ["good"])
    assert [pin["reason"] for pin in rows[3]["pins"]] == ["paper"]
    assert len(answer("ls", str(root), "--all")["checkpoints"]) > len(rows)


def test_ls_knows_a_seal_with_a_check_of_content(here: Path) -> None:
    assert ftckpt("seal", here / "run/step-1", "--level", "content").returncode == 0
    assert ftckpt("seal", here / "run/step-2", "--level", "structure").returncode == 0
    rows = answer("ls", str(here / "run"))["checkpoints"]
    assert [(r["step"], r["sealed"], r["verified"]) for r in rows] == [
        (2, True, False), (1, True, True),
    ]  # fmt: skip
    text = ftckpt("ls", cwd=here / "run").stdout
    assert re.search(r"step-1 .* COMMITTED +content ok, ", text)
    assert re.search(r"step-2 .* COMMITTED +(sealed|structure ok, )", text)


def test_ls_in_another_order_and_in_part(tmp_path: Path) -> None:
    root = tmp_path / "run"
    for step, age in ((100, 3 * DAY), (200, 2 * DAY), (300, DAY)):
        save(root, f"checkpoint-{step}", age)
    save(root, "checkpoint-250.tmp", 1.5 * DAY)
    (root / "checkpoint-200" / "more.txt").write_text("x" * 9000)
    assert ftckpt("tag", root, "200", "good").returncode == 0

    def steps(*words: str, code: int = 0) -> list[int | None]:
        document = answer("ls", str(root), *words)
        assert document["result"]["code"] == code
        return [one["step"] for one in document.get("checkpoints", [])]

    assert steps() == [300, 250, 200, 100]
    assert steps("--sort", "age") == [100, 200, 250, 300]
    assert steps("--sort", "size")[0] == 200
    assert steps("--sort", "name") == [100, 200, 250, 300]
    assert steps("--older-than", "60h") == [100]
    assert steps("--newer-than", "40h") == [300, 250]
    assert steps("--older-than", "30h", "--newer-than", "60h") == [250, 200]
    assert steps("--class", "abandoned") == [250]
    assert 250 not in steps("--class", "committed")
    assert steps("--tag", "good") == [200]
    assert steps("--tag", "bad", code=9) == []
    assert steps("--class", "good", code=2) == []


def test_ls_of_nothing_and_of_one_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert answer("ls", "/no/such/place")["result"]["code"] == 9
    for words in (str(STEP), f"{STEP}/", f"{RUN}@1"):
        (row,) = answer("ls", words)["checkpoints"]
        assert (row["step"], row["class"]) == (1, "COMMITTED"), words
    assert answer("ls", f"{RUN}@latest")["checkpoints"][0]["step"] == 2
    assert answer("ls", f"{RUN}@7")["result"]["code"] == 9
    assert answer("ls", str(STEP / ".metadata"))["result"]["code"] in (2, 13)
    assert answer("ls", str(tmp_path))["result"]["code"] == 9
    monkeypatch.chdir(STEP)
    assert answer("ls")["checkpoints"][0]["step"] == 1


def test_du_sums_by_component_and_layer(here: Path) -> None:
    check_golden("du.txt", ftckpt("du", "run/step-1", cwd=here))
    document = answer("du", str(here / "run/step-1"), "--depth", "1", "--match", "*.weight")
    sums = {(one["component"], one["prefix"]): one["bytes"] for one in document["sums"]}
    assert sums == {
        ("model", ""): 640 * 4, ("model", "0"): 512 * 4, ("model", "1"): 128 * 4,
        ("optimizer", ""): 2 * 640 * 4, ("optimizer", "0"): 2 * 512 * 4,
        ("optimizer", "1"): 2 * 128 * 4,
    }  # fmt: skip
    assert document["bytes"] == 3 * 640 * 4
    assert ftckpt("du", STEP, "--match", "nothing*").returncode == 9


def test_layers_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    weights(tmp_path, {f"layers.{n}.w": ("F32", [1], bytes(4)) for n in (10, 9, 2)})
    document = answer("du", str(tmp_path))
    prefixes = [one["prefix"] for one in document["sums"] if one["depth"] == 2]
    assert prefixes == ["layers.2", "layers.9", "layers.10"]


def test_inspect_lists_what_matches_in_an_order(here: Path) -> None:
    done = ftckpt("inspect", "run/step-1", "--match", "*.weight", "--sort", "bytes", cwd=here)
    check_golden("inspect-match.txt", done)
    check_golden("inspect-resume.txt", ftckpt("inspect", "run/step-1", "--resume", cwd=here))
    found = answer("inspect", str(STEP), "--tensor", "exp_avg*:1.*")["tensor"]
    assert {one["key"] for one in found} == {
        "exp_avg:1.weight", "exp_avg:1.bias", "exp_avg_sq:1.weight", "exp_avg_sq:1.bias",
    }  # fmt: skip
    assert ftckpt("inspect", STEP, "--match", "absent*").returncode == 9


def test_plain_weights_lack_a_training_in_one_line(tmp_path: Path) -> None:
    weights(tmp_path, {"w": ("F32", [2], bytes(8))})
    short, long = ftckpt("inspect", tmp_path).stdout, ftckpt("inspect", tmp_path, "--resume").stdout
    assert "for a restart: weights alone" in short
    assert "RNG of Python" not in short
    assert "RNG of Python" in long
    assert answer("inspect", str(tmp_path))["resume"]


def weights(place: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += content
    text = json.dumps(header).encode()
    (place / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)


def piped(*words: str | Path) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "ftckpt", *map(str, words)], capture_output=True, check=False
    )


def truth() -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Return the first weight as torch itself loads it."""
    import torch
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = FileSystemReader(STEP)
    held = reader.read_metadata().state_dict_metadata
    name = next(one for one in held if one.endswith("0.weight") and "optim" not in one)
    wanted = held[name]
    assert isinstance(wanted, TensorStorageMetadata)
    state = {name: torch.empty(wanted.size)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        state_dict_loader.load(state, storage_reader=reader)
    return state[name].numpy()


@pytest.mark.parametrize("part", ["", "0:4,:", "1:3,2", "-1", "5:,-3:", ":, 0:1", "4:2"])
def test_npy_is_what_torch_loads_and_numpy_slices(part: str) -> None:
    done = piped("cat", STEP, "0.weight", "--format", "npy", f"--slice={part}")
    assert (done.returncode, done.stderr) == (0, b"")
    expected = truth()[eval(f"np.s_[{part}]")] if part else truth()
    loaded = np.load(io.BytesIO(done.stdout))
    assert loaded.dtype == np.float32
    np.testing.assert_array_equal(loaded, expected)
    numbers = answer("cat", str(STEP), "0.weight", "--format", "json", f"--slice={part}")["values"]
    assert numbers == expected.tolist()


def test_statistics_and_histogram_are_numpys() -> None:
    expected = truth().astype(np.float64)
    found = answer("cat", str(STEP), "0.weight", "--format", "stats")["statistics"]
    assert (found["elements"], found["nan"], found["zeros"]) == (512, 0, 0)
    assert found["least"] == expected.min()
    for name, value in (
        ("mean", expected.mean()), ("std", expected.std()), ("norm", np.linalg.norm(expected)),
    ):  # fmt: skip
        assert found[name] == pytest.approx(float(value), rel=1e-12)
    drawn = answer("cat", str(STEP), "0.weight", "--format", "hist")["histogram"]
    assert sum(drawn["counts"]) == 512
    counts, edges = np.histogram(expected, 20)
    assert drawn["counts"] == counts.tolist()
    assert drawn["edges"] == pytest.approx(edges.tolist())
    text = ftckpt("cat", STEP, "0.weight", "--format", "hist").stdout
    assert max(map(len, re.findall("#+", text))) == 40


def test_special_values_are_counted(tmp_path: Path) -> None:
    numbers = np.array([0, 1, -2, np.nan, np.inf, -np.inf], "<f4")
    weights(tmp_path, {"w": ("F32", [6], numbers.tobytes()), "none": ("F32", [0], b""),
                       "same": ("I64", [3], np.full(3, 2**53 + 1, "<i8").tobytes())})  # fmt: skip
    found = answer("cat", str(tmp_path), "w", "--format", "stats")["statistics"]
    assert (found["nan"], found["infinite"], found["zeros"]) == (1, 2, 1)
    assert (found["least"], found["most"]) == (-2, 1)
    assert answer("cat", str(tmp_path), "w", "--format", "json")["values"][3:] == [
        "NaN", "Infinity", "-Infinity",
    ]  # fmt: skip
    assert sum(answer("cat", str(tmp_path), "w", "--format", "hist")["histogram"]["counts"]) == 3
    assert answer("cat", str(tmp_path), "none", "--format", "stats")["statistics"]["mean"] is None
    assert "no finite element" in ftckpt("cat", tmp_path, "none", "--format", "hist").stdout
    assert answer("cat", str(tmp_path), "same")["values"] == [2**53 + 1] * 3
    assert answer("cat", str(tmp_path), "same", "--format", "hist")["histogram"]["counts"] == [3]


@pytest.mark.parametrize(("code", "name"), [("BF16", "bfloat16"), ("F8_E4M3", "float8_e4m3fn")])
def test_types_that_numpy_lacks_are_said_and_exact(tmp_path: Path, code: str, name: str) -> None:
    import torch

    made = torch.tensor([0.5, -1.75, 240.0, 0.0]).to(getattr(torch, name))
    weights(tmp_path, {"w": (code, [4], made.view(torch.uint8).numpy().tobytes())})
    done = piped("cat", tmp_path, "w", "--format", "npy")
    assert f"npy has no {name}: written as float32" in done.stderr.decode()
    loaded = np.load(io.BytesIO(done.stdout))
    np.testing.assert_array_equal(loaded, made.float().numpy())
    shown = ftckpt("cat", tmp_path, "w").stdout
    assert name in shown
    assert "-1.75" in shown


def test_other_state_is_json() -> None:
    whole = json.loads(ftckpt("cat", STEP, "lr_scheduler").stdout)
    assert whole["step_size"] == 10
    assert json.loads(ftckpt("cat", STEP, "lr_scheduler.base_lrs.0").stdout) == 0.001
    assert json.loads(ftckpt("cat", STEP, "optimizer.param_groups.0.betas").stdout) == [0.9, 0.999]
    assert ftckpt("cat", STEP, "lr_scheduler.absent").returncode == 9
    assert ftckpt("cat", STEP, "lr_scheduler", "--format", "npy").returncode == 2


def test_only_the_bytes_of_the_part_are_read(tmp_path: Path) -> None:
    rows, row = 4096, 4096
    weights(tmp_path, {"w": ("F32", [rows, row // 4], bytes(rows * row))})
    base = answer("inspect", str(tmp_path))["bytes_read"]
    for words, most in ((["--slice", "7:9,:"], 2 * row), (["--slice", "100,3"], 4), ([], 8 * row)):
        read = answer("cat", str(tmp_path), "w", *words)["bytes_read"] - base
        assert 0 < read <= most, words
    whole = answer("cat", str(tmp_path), "w", "--format", "stats")["bytes_read"] - base
    assert whole == rows * row


def test_what_cannot_be_shown_is_a_sentence(tmp_path: Path) -> None:
    assert ftckpt("cat", STEP, "0.weight", "--slice", "99").returncode == 2
    assert ftckpt("cat", STEP, "0.weight", "--slice", "0:1,0,0").returncode == 2
    assert ftckpt("cat", STEP, "0.weight", "--slice", "a").returncode == 2
    near = ftckpt("cat", STEP, "0.weigth")
    assert (near.returncode, "did you mean 0.weight" in near.stderr) == (9, True)
    weights(tmp_path, {"w": ("F32", [1 << 20], bytes(4 << 20))})
    huge = ftckpt("cat", tmp_path, "w", "--format", "json", "--max-memory", "32MiB")
    assert (huge.returncode, "--slice" in huge.stderr) == (12, True)
    weights(tmp_path, {"w": ("F4", [4], bytes(2))})
    assert ftckpt("cat", tmp_path, "w").returncode == 13
    parent, child = pty.openpty()
    words = ["-m", "ftckpt", "cat", str(STEP), "0.weight", "--format", "npy"]
    terminal = subprocess.run(
        [sys.executable, *words], stdout=child, stderr=subprocess.PIPE, check=False,
        env=os.environ | {"TERM": "xterm"},
    )  # fmt: skip
    os.close(parent)
    os.close(child)
    assert (terminal.returncode, b"is a terminal" in terminal.stderr) == (2, True)
