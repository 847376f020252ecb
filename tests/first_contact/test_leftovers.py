"""What four rounds of unseen layouts left over, kind by kind."""

from __future__ import annotations

import bz2
import io
import json
import os
import pickle
import shutil
import time
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ftckpt.discovery.step_names import pieces_among
from tests.json_run import ftckpt_json


def code(*words: str) -> int:
    return int(ftckpt_json(*words)["result"]["code"])


def kinds(*words: str) -> list[str]:
    """Return the kinds of findings that are more than notes."""
    found = ftckpt_json(*words)["findings"]
    return [one["kind"] for one in found if one["severity"] != "note"]


# ---------------------------------------------------------------------------------------------
# A save whose name is a word is compared with those beside it


def two_models(folder: Path, step: int) -> None:
    """Write a save of two models, as audiotools does without its packages."""
    for name in ("dac", "discriminator"):
        (folder / name).mkdir(parents=True)
        weights = {"state_dict": {"layer.weight": torch.full((4, 4), float(step))}}
        torch.save(weights, folder / name / "weights.pth")
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(4, 4))])
        torch.save(optimizer.state_dict(), folder / name / "optimizer.pth")
    torch.save({"step": step}, folder / "dac" / "tracker.pth")


def tagged(root: Path) -> None:
    for step, name in enumerate(("10k", "50k", "best", "100k", "latest"), 1):
        two_models(root / name, 1000 * step)


@pytest.mark.parametrize("lost", ["dac", "discriminator"])
def test_a_save_with_a_word_for_a_name_misses_a_folder(tmp_path: Path, lost: str) -> None:
    root, out = tmp_path / "run", tmp_path / "out"
    tagged(root)
    last = root / "latest"
    assert code("verify", str(last), "--level", "content") == 0
    shutil.rmtree(last / lost)
    assert kinds("verify", str(last)) == ["missing-part"]
    assert code("verify", str(last), "--level", "content") == 5
    if lost == "discriminator":  # the other one has the step, and nothing calls this the newest
        assert code("verify", str(root)) == 5
    assert "missing-part" in [n["kind"] for n in ftckpt_json("inspect", str(last))["notes"]]
    assert code("convert", str(last), str(out), "--to", "safetensors") == 5
    assert not out.exists()
    newest = ftckpt_json("latest", str(root))
    assert newest["path"].endswith("100k")
    assert "lacks" in newest["skipped"][0]["message"]
    listed = {Path(one["path"]).name for one in ftckpt_json("ls", str(root))["checkpoints"]}
    assert listed == {"10k", "50k", "best", "100k", "latest"}


def test_a_best_save_may_have_less(tmp_path: Path) -> None:
    tagged(tmp_path)
    shutil.rmtree(tmp_path / "best" / "discriminator")
    assert kinds("verify", str(tmp_path / "best")) == ["state-unknown"]
    assert code("verify", str(tmp_path / "latest")) == 0


def test_ranks_and_small_files_of_the_last_are_counted_by_the_others(tmp_path: Path) -> None:
    for step, name in enumerate(("epoch_1", "epoch_2", "latest"), 1):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "trainer_state.json").write_text(f'{{"step": {step}}}')
        for rank in range(4):
            state = {"step": step, "model": {"layer.weight": torch.randn(4, 4)}}
            torch.save(state, folder / f"rank_{rank}.pt")
    last = tmp_path / "latest"
    assert code("verify", str(last)) == 0
    for lost in ("rank_3.pt", "trainer_state.json"):
        content = (last / lost).read_bytes()
        (last / lost).unlink()
        assert "missing-part" in kinds("verify", str(last))
        assert ftckpt_json("latest", str(tmp_path))["path"].endswith("epoch_2")
        (last / lost).write_bytes(content)
    assert ftckpt_json("latest", str(tmp_path))["path"].endswith("latest")


def test_an_export_called_the_last_is_no_save_with_less(tmp_path: Path) -> None:
    for step, name in enumerate(("epoch_1", "epoch_2"), 1):
        two_models(tmp_path / name, step)
    (tmp_path / "last").mkdir()
    save_file({"layer.weight": torch.ones(4, 4)}, tmp_path / "last" / "model.safetensors")
    (tmp_path / "last" / "config.json").write_text('{"model_type": "llama"}')
    assert kinds("verify", str(tmp_path / "last")) == []
    two_models(tmp_path / "samples", 9)
    shutil.rmtree(tmp_path / "samples" / "discriminator")
    assert ftckpt_json("latest", str(tmp_path))["path"].endswith("epoch_2")


def test_a_number_alone_among_words_is_compared_with_them(tmp_path: Path) -> None:
    for step, name in enumerate(("10k", "best", "latest"), 1):
        two_models(tmp_path / name, 1000 * step)
    shutil.rmtree(tmp_path / "10k" / "discriminator")
    assert kinds("verify", str(tmp_path / "10k")) == ["state-unknown"]
    assert code("latest", str(tmp_path)) == 0


# ---------------------------------------------------------------------------------------------
# Archives and streams of other programs


def archive(
    *, comment: bytes = b"", before: bytes = b"", after: bytes = b"", records: int = 2
) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_BZIP2) as file:
        for number in range(records):
            file.writestr(f"part_{number}.json", "{}" * 40)
        file.comment = comment
    return before + held.getvalue() + after


def torch_archive(comment: bytes) -> bytes:
    held = io.BytesIO()
    torch.save({"layer.weight": torch.ones(4)}, held)
    with zipfile.ZipFile(held, "a") as file:
        file.comment = comment
    return held.getvalue()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (archive(comment=b"by somebody"), "'part_0.json', 'part_1.json'"),
        (archive(comment=b"x" * 65535), "'part_0.json', 'part_1.json'"),
        (archive(comment=b"many", records=2000), "and 1997 more"),
        (archive(after=bytes(100)), "that torch.save did not write"),
        (archive(records=0, comment=b"empty"), "it holds nothing"),
        (bz2.compress(b"weights" * 200), "a bzip2 stream"),
        (bz2.compress(b""), "a bzip2 stream"),
        (b"SQLite format 3\0" + bytes(500), "an SQLite database"),
        (b"PAR1" + bytes(500) + b"PAR1", "a Parquet file"),
    ],
    ids=["comment", "long", "many", "padded", "empty", "bzip2", "bzip2-empty", "sqlite", "parquet"],
)
def test_another_programs_file_is_refused_by_name(
    tmp_path: Path, content: bytes, said: str
) -> None:
    path = tmp_path / "model_10.pt"
    path.write_bytes(content)
    for verb in ("verify", "inspect"):
        answer = ftckpt_json(verb, str(path))
        assert answer["result"]["code"] == 13
        assert said in json.dumps(answer)
    assert code("gc", str(tmp_path), "--keep-last", "1") in (0, 13)


@pytest.mark.parametrize(
    ("content", "verdict"),
    [
        (torch_archive(b"torch reads no archive with a comment"), 7),
        (archive()[:-30], 4),
        (archive(comment=b"long" * 20)[:-30], 4),
        (archive(before=pickle.dumps(print)), 7),
        (bz2.compress(b"weights" * 200)[1:], 4),
    ],
    ids=["torch", "cut", "cut-comment", "behind-a-pickle", "no-magic"],
)
def test_a_file_that_contradicts_itself_is_no_other_programs(
    tmp_path: Path, content: bytes, verdict: int
) -> None:
    path = tmp_path / "model_10.pt"
    path.write_bytes(content)
    assert code("verify", str(path)) == verdict


# ---------------------------------------------------------------------------------------------
# An optimizer's count is no step


@pytest.mark.parametrize("deep", [False, True])
def test_a_count_beside_moments_is_the_optimizers(tmp_path: Path, deep: bool) -> None:
    moments = {"exp_avg": torch.ones(4, 4), "exp_avg_sq": torch.ones(4, 4)}
    adam = {"layer.weight": {**moments, "step": torch.tensor(9.0)}}
    state: dict[str, object] = {"model": {"layer.weight": torch.ones(4, 4)}}
    path = tmp_path / "run.pt"
    for loop, said in (({}, "cannot tell"), ({"loop": {"step": 7}}, "present")):
        held = {"trainer": {"adam": adam}} if deep else {"adam": adam}
        torch.save({**state, **held, **loop}, path)
        for verb in (("inspect", "--resume"), ("replay", "audit")):
            items = ftckpt_json(*verb, str(path))["resume"]
            step = next(one for one in items if one["key"] == "step")
            assert step["presence"] == said
            assert ("optimizer's own count" in step["reason"]) is (not loop)
        wanted = code("latest", str(tmp_path), "--require", "step")
        assert wanted == (0 if loop else 6)


# ---------------------------------------------------------------------------------------------
# A verdict of 6 or 13 is no failure


def test_what_was_not_proven_is_not_called_failed(tmp_path: Path) -> None:
    for step in (10, 20):
        folder = tmp_path / f"step-{step}"
        folder.mkdir()
        torch.save({"step": step, "model": {"layer.weight": torch.ones(4)}}, folder / "model.pt")
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(4))])
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    (tmp_path / "step-10" / "package.pth").write_bytes(archive())
    scrub = ("scrub", str(tmp_path))
    for budget in ((), ("--budget", "1ms")):
        for _ in range(2):  # the second time it is remembered
            answer = ftckpt_json(*scrub, *budget)
            assert answer["result"]["code"] == 6
            assert "failed" not in answer["result"]["message"]
            assert answer["scrub"]["unproven"] == 1
    damaged = tmp_path / "step-20" / "model.pt"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    message = ftckpt_json(*scrub)["result"]["message"]
    assert message.startswith("1 of 2 checkpoints failed")
    assert message.endswith("and 1 are not proven")


# ---------------------------------------------------------------------------------------------
# The state of the last rank


def of_ranks(folder: Path, ranks: int, **more: int) -> None:
    """Write a save of accelerate without a record of the number of processes."""
    folder.mkdir(parents=True)
    save_file({"layer.weight": torch.ones(4, 4)}, folder / "model.safetensors")
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(4, 4))])
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    for name, count in {"random_states": ranks, **more}.items():
        for rank in range(count):
            state = {"torch_manual_seed": torch.get_rng_state(), "step": 3}
            torch.save(state, folder / f"{name}_{rank}.pkl")


def test_the_state_of_the_last_rank_is_missed(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        of_ranks(tmp_path / f"checkpoint-{step}", 4)
    for step, said in ((20, ["missing-part"]), (30, ["count-unknown"])):
        lost = tmp_path / f"checkpoint-{step}" / "random_states_3.pkl"
        assert kinds("verify", str(lost.parent)) == []
        content = lost.read_bytes()
        lost.unlink()
        assert kinds("verify", str(lost.parent)) == said
        lost.write_bytes(content)


def test_another_kind_in_the_save_shows_the_number_of_ranks(tmp_path: Path) -> None:
    for step in (10, 20):
        of_ranks(tmp_path / f"checkpoint-{step}", 4, custom_checkpoint=4)
    last = tmp_path / "checkpoint-20"
    (last / "random_states_3.pkl").unlink()
    assert "missing-part" in kinds("verify", str(last))
    # A job that went on with fewer ranks has fewer of all kinds.
    of_ranks(tmp_path / "checkpoint-30", 2, custom_checkpoint=2)
    assert kinds("verify", str(tmp_path / "checkpoint-30")) == ["count-unknown"]
    assert ftckpt_json("latest", str(tmp_path))["path"].endswith("checkpoint-30")


# ---------------------------------------------------------------------------------------------
# An older save that lacks a part


def of_parts(root: Path, steps: int, *, now: float, hours: float = 10) -> None:
    for step in range(10, 10 * steps + 10, 10):
        folder = root / f"step-{step}"
        folder.mkdir(parents=True)
        torch.save({"layer.weight": torch.ones(4, 4)}, folder / "model.pt")
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(4, 4))])
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")
        (folder / "trainer.json").write_text(f'{{"step": {step}}}')
        at = now - hours * 360 * (10 * steps - step)
        for path in (*folder.iterdir(), folder):
            os.utime(path, (at, at))


def test_ls_and_status_say_of_an_older_save_what_verify_says(tmp_path: Path) -> None:
    of_parts(tmp_path, 6, now=time.time())
    whole = {Path(one["path"]).name for one in ftckpt_json("ls", str(tmp_path))["checkpoints"]}
    run = ftckpt_json("status", str(tmp_path))["runs"][0]
    assert (run["counts"], run["alerts"]) == ({"COMMITTED": 6}, [])
    for step, lost in ((30, "optimizer.pt"), (40, "trainer.json")):
        folder = tmp_path / f"step-{step}"
        times = folder.stat().st_atime, folder.stat().st_mtime
        (folder / lost).unlink()
        os.utime(folder, times)
        assert code("verify", str(folder)) == 5
    listed = ftckpt_json("ls", str(tmp_path))["checkpoints"]
    assert {Path(one["path"]).name for one in listed} == whole
    torn = {Path(one["path"]).name: one for one in listed if "lacks" in one["why"]}
    assert set(torn) == {"step-30", "step-40"}
    assert {one["class"] for one in torn.values()} <= {"STAGING", "CORRUPT"}
    run = ftckpt_json("status", str(tmp_path))["runs"][0]
    assert run["counts"]["COMMITTED"] == 4
    assert run["newest"]["step"] == 60


def test_a_run_that_saves_less_from_a_step_on_is_whole(tmp_path: Path) -> None:
    of_parts(tmp_path, 6, now=time.time())
    for step in (40, 50, 60):
        (tmp_path / f"step-{step}" / "optimizer.pt").unlink()
    # The next save lacks it as well, so that nothing is known to be lost.
    listed = ftckpt_json("ls", str(tmp_path))["checkpoints"]
    assert [one["path"] for one in listed if "lacks" in one["why"]] == []


# ---------------------------------------------------------------------------------------------
# A piece is never a save


def pieces(folder: Path, names: Iterable[str], step: int | None = 100) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        state = {"model": {"layer.weight": torch.randn(4, 4)}}
        torch.save(state if step is None else {**state, "step": step}, folder / name)


GRID = [(a, b) for a in range(2) for b in range(2)]


@pytest.mark.parametrize(
    "names",
    [
        [f"weights_tp_rank_world_size={a}_2_pp_rank_world_size={b}_2.pth" for a, b in GRID],
        [f"tp{a}_pp{b}.pt" for a, b in GRID],
        ["model_mp0.pt", "model_mp1.pt"],
        ["model-0-of-2.pt", "model-1-of-2.pt"],
        ["step_100_tp0.pt", "step_100_tp1.pt", "step_200_tp0.pt", "step_200_tp1.pt"],
    ],
    ids=["world", "grid", "mp", "of", "steps"],
)
def test_no_verb_takes_a_piece_for_a_save(tmp_path: Path, names: list[str]) -> None:
    for step in (None, 100):
        pieces(tmp_path, names, step)
        for words in (("latest",), ("ls",), ("status",), ("verify",), ("gc", "--keep-last", "1")):
            answer = ftckpt_json(words[0], str(tmp_path), *words[1:])
            assert answer["result"]["code"] == 13, words
        assert "one rank's piece" in answer["result"]["message"]


@pytest.mark.parametrize(
    "names",
    [
        ["lora_rank8.pt", "lora_rank16.pt"],
        ["stage1.pt", "stage2.pt"],
        ["model_rank0.pt"],
        ["ep1-ba100.pt", "ep2-ba200.pt"],
    ],
)
def test_other_numbers_are_no_places_of_ranks(tmp_path: Path, names: list[str]) -> None:
    for number, name in enumerate(names, 1):
        pieces(tmp_path, [name], 100 * number)
    assert len(pieces_among(names)) == 0
    assert code("latest", str(tmp_path)) in (0, 2)  # some are read as one checkpoint


def test_the_folder_of_one_rank_is_not_the_run(tmp_path: Path) -> None:
    for rank in (0, 1):
        for step in (100, 200):
            pieces(tmp_path / "run" / f"rank_{rank}", [f"step_{step}.pt"], step)
            pieces(tmp_path / "sweep" / f"gpu{rank}", [f"step_{step}.pt"], step)
    pieces(tmp_path / "node" / "rank_0", ["step_100.pt"])
    for place in ("run", "run/rank_0", "run/rank_1"):
        for verb in ("latest", "ls", "status"):
            assert code(verb, str(tmp_path / place)) == 13, (verb, place)
    assert code("latest", str(tmp_path / "sweep" / "gpu0")) == 0
    assert code("latest", str(tmp_path / "node" / "rank_0")) == 0


# ---------------------------------------------------------------------------------------------
# Buffers are no parameters that lost their moments


@pytest.mark.parametrize("lost", [False, True])
def test_what_the_optimizer_never_had_is_not_lost(tmp_path: Path, lost: bool) -> None:
    net = torch.nn.Linear(4, 4)
    # Of a shape of its own, so that the optimizer's numbers are those of the others.
    net.register_buffer("returns_mean", torch.zeros(3))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    if lost:
        del state["state"][1]
    path = tmp_path / "model.pt"
    torch.save({"model": net.state_dict(), "optimizer": state}, path)
    items = ftckpt_json("inspect", "--resume", str(path))["resume"]
    moments = next(one for one in items if one["key"] == "moments")
    assert moments["presence"] == ("cannot tell" if lost else "present")
    if not lost:
        assert "returns_mean" in moments["reason"]


# ---------------------------------------------------------------------------------------------
# Counters of other names


@pytest.mark.parametrize(
    ("name", "state", "step"),
    [
        ("checkpoint_000003908_16007168.pth", {"train_step": 3908, "env_steps": 16007168}, 3908),
        ("best_000003908_16007168_r_3.1.pth", {"train_step": 3908, "env_steps": 16007168}, 3908),
        ("latest.pth", {"train_step": 3908, "env_steps": 16007168}, 3908),
        ("model_512.pt", {"agent_step": 512}, 512),
        ("model_512.pt", {"num_timesteps": 512, "n_steps": 2048}, 512),
        ("model_512.pt", {"step": 7, "train_step": 512}, 7),
        # A setting of the run, or a count of another clock.
        ("model_512.pt", {"train_steps": 100000}, None),
        ("model_512.pt", {"total_timesteps": 1000000}, None),
        ("latest.pth", {"env_steps": 16007168}, None),
        ("model_7_9.pt", {"env_steps": 7, "agent_steps": 9}, None),
    ],
)
def test_the_name_bears_a_counter_out(
    tmp_path: Path, name: str, state: dict[str, int], step: int | None
) -> None:
    torch.save({"model": {"layer.weight": torch.ones(4, 4)}, **state}, tmp_path / name)
    assert ftckpt_json("inspect", str(tmp_path / name))["step"] == step


def test_a_counter_of_an_unsure_name_accuses_no_file(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for rank in range(2):
        state = {"model": {"layer.weight": torch.ones(4, 4)}, "step": 5, "env_steps": 10 + rank}
        torch.save(state, folder / f"rank_{rank}.pt")
    assert "mixed-steps" not in kinds("verify", str(folder))
