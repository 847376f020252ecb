"""A real training below a guard: torchrun, two ranks, DCP that is sealed while it is saved."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ftckpt.discovery import root_marker
from ftckpt.storage import StoreOptions

pytest.importorskip("torch")

TRAINER = """
import glob, json, os, signal, sys, warnings
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ftckpt.torch import SealingWriter

warnings.simplefilter("ignore")
root, losses = sys.argv[1], sys.argv[2]
resume = sys.argv[4] if len(sys.argv) > 4 else None
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
begun = 0


def state():
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": begun}


if resume:
    model(torch.zeros(1, 8)).sum().backward()
    optimizer.step()  # so that there is state to load into
    found = state()
    dcp.load(found, checkpoint_id=resume)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    begun = found["step"]
for step in range(begun + 1, 6):
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
    optimizer.zero_grad()
    loss = (model(batch) ** 2).mean()
    loss.backward()
    for each in model.parameters():
        dist.all_reduce(each.grad)
    optimizer.step()
    begun = step
    if rank == 0:
        with open(losses, "a") as file:
            file.write(json.dumps([step, loss.item().hex(), resume]) + "\\n")
    if step <= 3:
        path = f"{root}/step-{step}"
        dcp.save(state(), storage_writer=SealingWriter(dcp.FileSystemWriter(path)))
    if step == 3 and not resume and rank == 0:  # a bit of the newest save flips at rest
        raw = model.weight.detach().numpy().tobytes()
        (file,) = [one for one in glob.glob(f"{path}/*.distcp") if raw in open(one, "rb").read()]
        data = bytearray(open(file, "rb").read())
        data[data.index(raw) + 5] ^= 1
        open(file, "wb").write(data)
    if step == 5 and not resume and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
dist.destroy_process_group()
"""


def test_a_killed_rank_and_a_flipped_bit_change_no_loss(tmp_path: Path) -> None:
    from tests.replay.train import keep_compiler_out

    root, script, losses = tmp_path / "root", tmp_path / "train.py", tmp_path / "losses"
    root.mkdir()
    root_marker.create_root(str(root), StoreOptions())
    quickly = f"import sys, types\nfrom typing import Any\n{inspect.getsource(keep_compiler_out)}"
    script.write_text(f"{quickly}\nkeep_compiler_out()\n{TRAINER}")
    launch = [
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script),
        str(root), str(losses), "--resume", "{}",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "ftckpt", "guard", str(root), "--json", "--set", "backoff=0",
         "--every", "60s", "--", sys.executable, *launch],
        capture_output=True, text=True, check=False, timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in losses.read_text().splitlines()]
    first = {step: loss for step, loss, resume in told if resume is None}
    second = {step: loss for step, loss, resume in told if resume is not None}
    assert list(first) == [1, 2, 3, 4, 5]
    assert {resume for _, _, resume in told} == {None, f"{root}/step-2"}
    assert second == {step: first[step] for step in (3, 4, 5)}
    document = json.loads(done.stdout)
    assert document["restarts"] == 1
    last = [one for one in document["decisions"] if one["event"] == "start"][-1]
    assert "step-3: CORRUPT" in last["skipped"][0]
