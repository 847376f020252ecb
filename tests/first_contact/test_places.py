"""One notion of what a path is: steps of several parts, by every verb, and roots of strangers."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.discovery import resolve as opening
from ftckpt.errors import ExitCode
from ftckpt.formats.catalog import FORMATS
from ftckpt.storage import StoreOptions
from tests.builders.checkpoints import open_checkpoint, save_dcp
from tests.json_run import ftckpt_json

OK, CORRUPT, INCOMPLETE = ExitCode.OK, ExitCode.CORRUPT, ExitCode.INCOMPLETE
UNVERIFIED, UNSUPPORTED, USAGE = ExitCode.UNVERIFIED, ExitCode.UNSUPPORTED, ExitCode.USAGE


def code(*arguments: object) -> int:
    return int(ftckpt_json(*map(str, arguments))["result"]["code"])


def kinds(place: object) -> set[str]:
    return {one["kind"] for one in ftckpt_json("verify", str(place))["findings"]}


def chosen(root: Path) -> str:
    return str(ftckpt_json("latest", str(root)).get("path") or "").rpartition("/")[2]


def state(step: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(step)
    net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return net, optimizer


def put(path: Path, value: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path)
    return path


def weights(path: Path, step: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in state(step)[0].state_dict().items()}, path)
    return path


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def say(path: Path, **fields: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(fields))


# --- steps of several parts, after the trainers' sources ------------------------------------------


def two_stores(folder: Path, step: int) -> Path:
    """Write a store and the state of each rank, as OLMo-core does under names of its own.

    What OLMo-core's own names promise is tested in `test_trainers`.
    """
    save_dcp(folder / "weights_and_moments", step=step)
    for rank in range(2):
        rng = torch.get_rng_state()
        put(folder / f"loop/rank{rank}.pt", {"global_step": step, "rng": rng, "world_size": 2})
    say(folder / "config.json", model={"d_model": 64})
    say(folder / ".complete.json", version="2.3.0")
    return folder


def three_deep(folder: Path, step: int) -> Path:
    """Write stores three folders down, as NeMo-RL does (nemo_rl/utils/checkpoint.py)."""
    weights(folder / "policy/weights/model/model.safetensors", step)
    save_dcp(folder / "policy/optimizer/optim", step=step)
    say(folder / "policy/tokenizer/tokenizer_config.json")
    put(folder / "train_dataloader.pt", {"_sampler_iter_yielded": step})
    say(folder / "training_info.json", step=step, consumed_samples=8 * step)
    return folder


def pretrained_and_state(folder: Path, step: int) -> Path:
    """Write what LeRobot does (lerobot/common/utils/train_utils.py, save_checkpoint)."""
    weights(folder / "pretrained_model/model.safetensors", step)
    say(folder / "pretrained_model/train_config.json", seed=1)
    below = folder / "training_state"
    optimizer = state(step)[1].state_dict()["state"]
    below.mkdir(parents=True)
    save_file(
        {f"state/{i}/{k}": v for i, held in optimizer.items() for k, v in held.items()},
        below / "optimizer_state.safetensors",
    )
    save_file({"torch_rng_state": torch.get_rng_state()}, below / "rng_state.safetensors")
    say(below / "optimizer_param_groups.json", lr=0.1)
    say(below / "training_step.json", step=step)
    return folder


def loose_files(folder: Path, step: int) -> Path:
    """Write a file of each object, as SpeechBrain does (speechbrain/utils/checkpoints.py)."""
    net, optimizer = state(step)
    put(folder / "model.ckpt", net.state_dict())
    put(folder / "optimizer.ckpt", optimizer.state_dict())
    (folder / "counter.ckpt").write_text(f"{step}\n")
    (folder / "brain.ckpt").write_text(f"avg_train_loss: 0.1\noptimizer_step: {step}\n")
    (folder / "CKPT.yaml").write_text("end-of-epoch: true\n")
    return folder


def two_models(folder: Path, step: int) -> Path:
    """Write two models and their optimizers in folders of their own."""
    for role in ("actor", "critic"):
        save_dcp(folder / role, step=step)
    return folder


Layout = Callable[[Path, int], Path]
LAYOUTS = {
    "step{}": two_stores,
    "step_{}": three_deep,
    "{:06}": pretrained_and_state,
    "global_step_{}": two_models,
}
LOST: dict[Layout, list[str]] = {
    two_stores: ["weights_and_moments", "loop", ".complete.json"],
    three_deep: ["policy/optimizer", "policy/weights", "train_dataloader.pt"],
    pretrained_and_state: ["pretrained_model", "training_state/optimizer_state.safetensors"],
    two_models: ["actor", "critic"],
}


@pytest.fixture(params=LAYOUTS.items(), ids=lambda item: item[1].__name__)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, list[Path], Layout]:
    name, write = request.param
    root = tmp_path / "run"
    return root, [write(root / name.format(step), step) for step in (10, 20, 30)], write


def test_a_step_of_parts_is_one_checkpoint_for_every_verb(
    run: tuple[Path, list[Path], Layout], tmp_path: Path
) -> None:
    root, (first, second, third), _ = run
    whole = open_checkpoint(third)
    files = {f.relative_to(third).as_posix() for f in third.rglob("*") if f.is_file()}
    assert (whole.format, set(whole.members())) == ("bundle", files)
    assert whole.step == 30
    assert "model" in {info.component for info in whole.tensors.values()}
    for place in (third, f"{root}@20", f"{root}@latest"):
        assert code("verify", place) == OK
        assert ftckpt_json("inspect", str(place))["format"] == "bundle"
    assert chosen(root) == third.name
    assert code("seal", second) == OK
    assert code("copy", f"{root}@10", tmp_path / "anything") == OK
    assert code("verify", tmp_path / "anything", "--level", "content") == OK
    assert code("diff", first, tmp_path / "anything") == OK
    assert code("diff", first, second) in (OK, ExitCode.DIFFERENT)
    assert code("delta", "pack", first, second, tmp_path / "delta") == OK
    assert code("verify", tmp_path / "delta") == OK
    assert code("convert", third, tmp_path / "store", "--to", "dcp") == OK
    listed = ftckpt_json("ls", str(root))
    assert [one["format"] for one in listed["checkpoints"]] == ["bundle"] * 3
    assert code("status", root) in (OK, ExitCode.PARTIAL)


def test_what_a_step_holds_is_carried_bit_for_bit(
    run: tuple[Path, list[Path], Layout], tmp_path: Path
) -> None:
    _, (step, *_), _ = run
    source = open_checkpoint(step)
    assert code("convert", step, tmp_path / "store", "--to", "dcp") == OK
    made = open_checkpoint(tmp_path / "store")
    assert source.tensors.keys() == made.tensors.keys()
    for key in source.tensors:
        assert read_tensor(source, key) == read_tensor(made, key)


def test_a_part_that_the_steps_beside_have_is_lost(run: tuple[Path, list[Path], Layout]) -> None:
    root, (_, second, third), write = run
    for lost in LOST[write]:
        gone = third / lost
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
        assert chosen(root) == second.name
        assert code("verify", third) == code("verify", f"{root}@30") == INCOMPLETE
        assert "missing-part" in kinds(third)
        classes = {
            one["name"]: one["entry_class"]
            for one in ftckpt_json("gc", str(root), "--keep-last", "1", "--min-survivors", "1")[
                "plan"
            ]["decisions"]
            if one["keep"]
        }
        assert classes[second.name] == "COMMITTED"
        assert classes[third.name] != "COMMITTED"
        shutil.rmtree(third)
        write(third, 30)


def test_damage_in_any_part_is_found_by_every_verb(run: tuple[Path, list[Path], Layout]) -> None:
    root, (_, second, third), write = run
    data = (".pt", ".distcp", ".safetensors")
    for file in sorted(f for f in third.rglob("*") if f.suffix in data):
        whole = file.read_bytes()
        cut(file)
        assert code("verify", third) == CORRUPT, file
        assert chosen(root) == second.name
        assert code("copy", third, root.parent / "copy") == CORRUPT
        file.write_bytes(whole)
    assert write is not None


def test_a_step_without_its_weights_is_no_checkpoint(tmp_path: Path) -> None:
    step = two_stores(tmp_path / "step30", 30)
    shutil.rmtree(step / "weights_and_moments")
    assert code("verify", step) == code("latest", tmp_path) == UNSUPPORTED
    step = three_deep(tmp_path / "other/step_30", 30)
    shutil.rmtree(step / "policy")
    assert code("verify", step) == code("latest", step.parent) == UNSUPPORTED
    step = pretrained_and_state(tmp_path / "third/000030", 30)
    shutil.rmtree(step / "pretrained_model")  # the optimizer's tensors are no weights
    assert code("verify", step) == code("latest", step.parent) == UNSUPPORTED


def test_a_save_in_flight_is_passed_over(tmp_path: Path) -> None:
    two_stores(tmp_path / "step10", 10)
    two_stores(tmp_path / "step20", 20)
    shutil.rmtree(tmp_path / "step20/weights_and_moments")  # loop/ is written first
    (tmp_path / "step20/.complete.json").unlink()
    assert chosen(tmp_path) == "step10"
    assert code("verify", tmp_path / "step20") == INCOMPLETE


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_folder_without_a_tensor_is_never_ok(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    save({"step": 3}, checkpoint_id=tmp_path / "step-3", no_dist=True)
    assert code("verify", tmp_path / "step-3") == code("latest", tmp_path) == UNVERIFIED


def test_an_older_step_alone_does_not_prove_a_loss(tmp_path: Path) -> None:
    two_models(tmp_path / "global_step_1", 1)
    two_models(tmp_path / "global_step_2", 2)
    shutil.rmtree(tmp_path / "global_step_2/critic")
    found = ftckpt_json("latest", str(tmp_path))
    assert found["path"].endswith("global_step_2")
    assert "state-unknown" in kinds(tmp_path / "global_step_2")
    assert code("verify", tmp_path / "global_step_2", "--strict=counts") == UNVERIFIED


def test_a_file_of_tensors_that_no_part_holds_is_named(tmp_path: Path) -> None:
    step = two_stores(tmp_path / "step10", 10)
    (step / "replay.pkl").write_bytes(b"\x00\x01" * 50)
    found = ftckpt_json("verify", str(step))
    assert found["result"]["code"] == UNVERIFIED
    assert ("unknown-part", "replay.pkl") in {(f["kind"], f.get("file")) for f in found["findings"]}
    # The same beside a store that a format of its own reads.
    save_dcp(tmp_path / "other/step-10", step=10)
    put(tmp_path / "other/step-10/extra/ema.pt", {"w": torch.ones(2)})
    assert code("verify", tmp_path / "other/step-10") == UNVERIFIED
    assert code("latest", tmp_path / "other") == UNVERIFIED
    # Steps below a checkpoint are checkpoints of their own.
    weights(tmp_path / "final/model.safetensors")
    weights(tmp_path / "final/checkpoint-5/model.safetensors")
    assert code("verify", tmp_path / "final") == OK


def test_pieces_of_one_model_are_refused_by_name(tmp_path: Path) -> None:
    for step in (1, 2):
        folder = tmp_path / f"checkpoint_{step:06}"
        for rank in range(2):  # the names of Ray Train's user guide
            piece = {"w": torch.full((2,), rank)}
            put(folder / f"model-rank={rank}.pt", piece)
        put(folder / "extra_state.pt", {"epoch": step})
    last = tmp_path / "checkpoint_000002"
    assert code("verify", last) == code("inspect", last) == code("latest", tmp_path) == UNSUPPORTED
    plan = ftckpt_json("gc", str(tmp_path), "--keep-last", "1", "--min-survivors", "1")["plan"]
    assert {one["entry_class"] for one in plan["decisions"]} == {"FOREIGN"}


def test_a_tree_of_slices_is_13_for_every_verb(tmp_path: Path) -> None:
    """nanotron's places (nanotron/serialize/weights.py)."""
    for step in (1, 2):
        for module in ("embed", "layers/0", "layers/1"):
            for rank in range(2):
                name = f"model_weight_pp-rank-0-of-1_tp-rank-{rank}-of-2.safetensors"
                path = tmp_path / f"{step}/model/model/{module}/{name}"
                path.parent.mkdir(parents=True, exist_ok=True)
                save_file({"data": torch.ones(2, 2)}, path)
        for rank in range(2):
            name = f"optimizer/optimizer_pp-0-of-1_tp-{rank}-of-2_exp-0-of-1.pt"
            put(tmp_path / f"{step}/{name}", state(1)[1].state_dict())
        say(tmp_path / f"{step}/checkpoint_metadata.json", tp=2)
    for words in (["verify"], ["inspect"]):
        assert code(*words, tmp_path / "2") == code(*words, tmp_path) == UNSUPPORTED
    assert code("latest", tmp_path) == UNSUPPORTED
    plan = ftckpt_json("gc", str(tmp_path), "--keep-last", "1", "--min-survivors", "1")["plan"]
    assert all(one["keep"] for one in plan["decisions"])


def test_modules_in_folders_are_no_models(tmp_path: Path) -> None:
    for module in ("embed", "head"):
        path = tmp_path / f"step-1/model/{module}/model_weight.safetensors"
        path.parent.mkdir(parents=True)
        save_file({"data": torch.ones(2)}, path)
    assert code("verify", tmp_path / "step-1") == code("latest", tmp_path) == UNSUPPORTED


def test_files_of_one_object_each_are_one_checkpoint(tmp_path: Path) -> None:
    for hour in (10, 11, 12):
        loose_files(tmp_path / f"CKPT+2025-06-15+{hour}-00-00+00", hour)
    step = tmp_path / "CKPT+2025-06-15+12-00-00+00"
    assert code("verify", step, "--level", "values") == OK
    components = {info.component for info in open_checkpoint(step).tensors.values()}
    assert components == {"model", "optimizer"}
    assert code("latest", tmp_path) not in (ExitCode.NOT_FOUND, ExitCode.MISSING)
    cut(step / "model.ckpt")
    assert code("verify", step) == CORRUPT


@pytest.mark.parametrize(
    "names",
    [
        ("best.pt", "last.pt"),
        ("model_100.pt", "model_200.pt", "optimizer_100.pt", "optimizer_200.pt"),
        ("model_best.pt", "optimizer.pt"),
        ("model.pt", "model_final.pt"),
    ],
)
def test_checkpoints_side_by_side_stay_a_root(names: tuple[str, ...], tmp_path: Path) -> None:
    for name in names:
        put(tmp_path / "run/7" / name, {"w": torch.ones(2)})
        put(tmp_path / "run/out" / name, {"w": torch.ones(2)})
    for place in ("run/7", "run/out"):
        target = opening.open_target(str(tmp_path / place), FORMATS, StoreOptions())
        assert target.root is not None, names


def test_roots_of_two_roles_are_told(tmp_path: Path) -> None:
    """OpenRLHF's places: states of each role, and the actor's weights beside them."""
    for step in (10, 20, 30):
        for role in ("_actor", "_critic"):
            save_dcp(tmp_path / role / f"global_step{step}", step=step)
        weights(tmp_path / f"global_step{step}_hf/model.safetensors", step)
    found = ftckpt_json("latest", str(tmp_path))
    if found["result"]["code"] == OK:
        assert found["path"].endswith("global_step30_hf")
    else:
        assert found["result"]["code"] == USAGE
        assert "_actor" in found["result"]["hint"]
    assert chosen(tmp_path / "_actor") == "global_step30"


# --- roots that hold somebody's files -------------------------------------------------------------


def zip_of_another_library(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("policy.pth", b"x" * 100)


STRANGERS: dict[str, Callable[[Path], object]] = {
    "versions": lambda root: put(root / "v3/model.ckpt", {"w": torch.ones(2)}),
    "artifacts": lambda root: put(root / "0/a1b2/artifacts/model/data/model.pth", {}),
    "zips": lambda root: zip_of_another_library(root / "ppo_100_steps.zip"),
    "unknown": lambda root: (root / "weights.xyz").write_bytes(os.urandom(64)),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_a_root_of_strangers_is_no_empty_root(name: str, tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    STRANGERS[name](root)
    for _ in range(2):
        for words in (["latest"], ["ls"], ["verify"], ["gc", "--keep-last", "1"]):
            assert code(*words, root) == UNSUPPORTED, words
        assert code("latest", root, "--create-root") == UNSUPPORTED
    there = sorted(p.name for p in root.iterdir() if p.name != ".ftckpt")
    assert there[0] in ftckpt_json("latest", str(root))["result"]["message"]


def test_logs_and_texts_are_nothing(tmp_path: Path) -> None:
    root = tmp_path / "run"
    for name in ("logs/a.log", "tb/events.out.tfevents.1", "hostfile", "config.yaml", ".git/HEAD"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("text\n")
    (root / "empty").mkdir()
    assert code("latest", root) == ExitCode.MISSING
    assert code("latest", root, "--create-root") == ExitCode.OK
    assert code("verify", root) == ExitCode.NOT_FOUND
