"""Recording: digests wherever a tensor lies, the injected hook, and the one-line hook."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ftckpt.checkpoint import Box
from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.digests.tensors import TensorDigest
from ftckpt.replay.compare.logs import compare
from ftckpt.replay.processes import Settings, read_settings, values_file
from ftckpt.replay.record import tensors as device_sums_module
from ftckpt.replay.record.journal import Journal
from ftckpt.replay.record.log import Log, read_log, written
from ftckpt.replay.record.streams import distance, read_stream
from ftckpt.replay.record.tensors import device_sums, tensor_digest
from ftckpt.replay.record.training import random_streams, value_items
from ftckpt.replay.run.one_run import End, environment, run
from tests.commands.golden import ftckpt
from tests.replay.train import keep_compiler_out

TRAIN = Path(__file__).parent / "train.py"
# What the small programs below begin with.
QUICKLY = f"""
import sys, types
from typing import Any
{inspect.getsource(keep_compiler_out)}
keep_compiler_out()
"""


@pytest.mark.parametrize(
    "dtype",
    ["float32", "bfloat16", "float16", "float64", "int64", "int8", "uint8", "bool", "complex64",
     "complex128", "float8_e4m3fn"],
)  # fmt: skip
def test_sums_on_a_device_are_the_tensor_digest(dtype: str) -> None:
    tensor = (torch.randn(5, 7) * 9).to(getattr(torch, dtype))
    digest = TensorDigest(DTYPES[dtype], tensor.shape)
    digest.update(Box.whole((5, 7)), tensor.reshape(-1).view(torch.uint8).numpy())
    assert device_sums(tensor) == digest.sums
    shown = "".join(f"{part:016x}" for part in digest.sums)
    assert tensor_digest(tensor) == f"{dtype}[5,7]:{shown}"
    assert tensor_digest(tensor.t().contiguous().t()) == tensor_digest(tensor)


def test_sums_of_more_than_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_sums_module, "_CHUNK", 7)
    for count in (0, 1, 7, 8, 50):
        tensor = torch.arange(count, dtype=torch.int16)
        digest = TensorDigest(DTYPES["int16"], tensor.shape)
        digest.update(Box.whole((count,)), tensor.numpy().tobytes())
        assert device_sums(tensor) == digest.sums


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_cuda_device_agrees_with_the_processor(tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.complex128, torch.bool):
        tensor = (torch.randn(1 << 20) * 9).to(dtype)
        assert tensor_digest(tensor.cuda()) == tensor_digest(tensor)
    device = f"cuda:{torch.cuda.current_device()}"
    before = read_stream(random_streams(whole=True)[device])
    torch.randn(4, device="cuda")
    after = read_stream(random_streams(whole=True)[device])
    assert (distance(before, after) or 0) > 0
    # Whatever was kept on a device is read where there is none.
    asked = Settings(log=str(tmp_path), look_step=1, look_event="grad", look_items="w")
    Journal(asked).keep(1, "grad", "w", torch.ones(3, device="cuda"))
    assert values_file(tmp_path, 0, 0).read_bytes().endswith(torch.ones(3).numpy().tobytes())


def test_what_cannot_be_read_is_told_by_its_shape() -> None:
    assert tensor_digest(torch.zeros(3, device="meta")) == "float32[3]:not read"
    assert tensor_digest(torch.eye(3).to_sparse()) == "float32[3,3]:not read"


def test_nested_state_becomes_items() -> None:
    items = value_items({"a": [1, 2.0, None], "b": {"c": "text", "d": True}, "e": object()})
    assert items == {
        "a.0": "1", "a.1": "float64 0x1.0000000000000p+1", "a.2": "None", "b.c": "text",
        "b.d": "True", "e": "object: not read",
    }  # fmt: skip


def test_settings_pass_through_the_environment() -> None:
    settings = Settings("/log", 10, 30, 8, 5, 2, True)
    assert read_settings(settings.environment()) == settings
    assert read_settings({}) == Settings()
    assert [n for n in range(1, 33) if Settings(at=10, last=30, dense_from=11, every=10)
            .reads_tensors(n)] == [1, 11, 21, 31, 32]  # fmt: skip


def test_an_unmodified_script_that_forgets_its_rng(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN.read_text())
    done = ftckpt(
        "replay", "run", "--steps", "3", "--runs", "1", "--dir", "trial", "--json", "--",
        sys.executable, "train.py", "--drop", "torch", cwd=tmp_path,
    )  # fmt: skip
    answer = json.loads(done.stdout)
    assert done.returncode == 3, answer["result"]
    said = answer["result"]["message"]
    assert said.startswith("restart is not exact: torch RNG not restored: ")
    assert "first seen at step 5 as the step begins; batch equal, loss differs by " in said
    assert [(c["component"], c["step"]) for c in answer["causes"]] == [("rng-torch", 5)]
    # With the fix: from the same checkpoint, against the same uninterrupted run.
    done = ftckpt(
        "replay", "run", "--steps", "3", "--runs", "1", "--dir", "fixed", "--at", "4",
        "--checkpoint", "trial/interrupted/state/ckpt", "--reference", "trial/baseline-1/log",
        "--json", "--", sys.executable, "train.py", "--dir", "{checkpoint}", cwd=tmp_path,
    )  # fmt: skip
    answer = json.loads(done.stdout)
    assert done.returncode == 0, answer["result"]
    assert answer["result"]["message"] == "the restart is exact for 3 steps (5 to 7, 1 rank)"


def test_loader_workers_write_no_log_and_run_ahead_of_a_global_generator(tmp_path: Path) -> None:
    def run(log: str, workers: str) -> Log:
        settings = Settings(log=str(tmp_path / log), every=0)
        subprocess.run(
            [sys.executable, TRAIN, "--steps", "3", "--workers", workers, "--dir", tmp_path / log],
            env=environment(settings), timeout=120, check=True,
        )  # fmt: skip
        names = sorted(path.name for path in (tmp_path / log).iterdir())
        assert names == ["rank-0.jsonl"]
        return read_log(tmp_path / log)

    # The sampler draws from NumPy's global generator, and workers make it run ahead.
    first = compare(run("none", "0"), run("one", "1"), 1, 3).differences[0]
    assert (first.step, first.event) == (1, "rng_start")
    assert first.items[0].name == "numpy"


def run_python(code: str, log: Path, path: str = "") -> subprocess.CompletedProcess[str]:
    variables = environment(Settings(log=str(log)), {"PYTHONPATH": path})
    return subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip


def test_the_injected_module_hands_over_to_the_one_it_hides(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('mine')")
    done = run_python("import sys; print('torch' in sys.modules)", tmp_path / "log", str(tmp_path))
    assert (done.stdout, done.stderr) == ("mine\nFalse\n", "")
    assert not (tmp_path / "log").exists()  # no training, no log


CALLED = """
import torch
class Pair(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(2, 1)
    def forward(self, first, *, second, mask=None):
        return self.inner(input=first + second)
model = Pair()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for n in range(1, 3):
    with torch.no_grad():
        model(torch.zeros(2), second=torch.zeros(2))  # an evaluation
    model(torch.full((2,), float(n)), second=torch.ones(2), mask={"at": n}).sum().backward()
    optimizer.step()
"""


def test_keyword_arguments_of_the_model_are_recorded(tmp_path: Path) -> None:
    done = run_python(QUICKLY + CALLED, tmp_path / "log")
    assert (done.returncode, done.stderr) == (0, "")
    steps = read_log(tmp_path / "log").steps[0]
    for n in (1, 2):
        assert steps[n].events["input"] == {
            "0": tensor_digest(torch.full((2,), float(n))),
            "second": tensor_digest(torch.ones(2)),
            "mask.at": str(n),
        }


HOOKED = """
import torch
from ftckpt import hook
weight = torch.zeros(2)
for n in range(1, 4):
    weight += n
    hook.step(step=n, loss=weight.sum(), cursor={"sample": 4 * n}, params={"w": weight})
"""


def test_the_one_line_hook_records_a_training_without_a_torch_optimizer(tmp_path: Path) -> None:
    done = run_python(HOOKED, tmp_path / "log")
    assert done.returncode == 0, done.stderr
    log = read_log(tmp_path / "log")
    assert log.finished() == (1, 2, 3)
    events = log.steps[0][3].events
    assert events["loss"]["0"] == written(12.0, "float32")
    assert events["told"]["cursor.sample"] == "12"
    assert events["told"]["params.w"] == tensor_digest(torch.full((2,), 6.0))


def test_the_one_line_hook_does_nothing_elsewhere(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from ftckpt import hook; hook.step(loss=object()); hook.install();"
         "import sys; print('torch' in sys.modules)"],
        capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.stdout == "False\n"
    assert list(tmp_path.iterdir()) == []


CRASHES = """
import time
import torch
class Slow:  # torch too takes longer to be gone than the waiting process sleeps
    def __del__(self, sleep=time.sleep):
        sleep(0.5)
slow = Slow()
net = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(2):
    net(torch.ones(2)).sum().backward()
    optimizer.step()
raise RuntimeError("boom")
"""


def test_a_crash_is_no_end_of_the_recording(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(QUICKLY + CRASHES)
    for last, end in ((9, End.CRASHED), (1, End.RECORDED)):
        settings = Settings(log=str(tmp_path / f"log-{last}"), last=last)
        outcome = run([sys.executable, str(script)], settings, cwd=tmp_path,
                      output=tmp_path / "output.txt", timeout=60)  # fmt: skip
        assert outcome.end is end, outcome
        assert read_log(Path(settings.log)).finished() == tuple(range(1, min(last, 2) + 1))
