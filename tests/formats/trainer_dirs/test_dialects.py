"""Steps of VeOmni, prime-rl, pith-train, xtuner, miles and RLinf, and S3StorageWriter's copies.

`tests/data/dialects/make_dialects.py` wrote them with torch's own saves.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp

from ftckpt.checkpoint import Checkpoint, CommitState
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.discovery.resolve import open_target
from ftckpt.errors import ExitCode, IncompleteError
from ftckpt.formats.catalog import FORMATS
from ftckpt.formats.trainer_dirs.nested import nest_among, nest_in
from ftckpt.inspection.resume import Presence, resume_check
from ftckpt.storage import StoreOptions
from ftckpt.verification import Level, VerifyOptions, VerifyReport, verify
from tests.builders.archives import extract
from tests.commands.golden import ftckpt
from tests.conformance.formats import listing_of_path
from tests.json_run import ftckpt_json

DATA = Path(__file__).parent.parent.parent / "data" / "dialects"
# The step's folder; a file of one rank; a side file of the trainer, "" for none.
KINDS = {
    "veomni": ("global_step_3", "extra_state/extra_state_rank_1.pt"),
    "prime": ("step_3", "trainer/dataloader/rank_1.pt"),
    "pith": ("step-00000003", "rng-rank-00001.pt"),
    "xtuner": ("step-3", "weights/__1_0.distcp"),
    "rlinf": ("global_step_3", "critic/dcp_checkpoint/__1_0.distcp"),
    "rlinf_sac": ("global_step_3", "actor/sac_components/target_model/checkpoint_rank_1.pt"),
    "rlinf_iql": ("global_step_3", "actor/critic/local_shard_checkpoint/checkpoint_rank_1.pt"),
    "miles": ("iter_0000003", "optimizer/__1_0.distcp"),
    "copies": ("step-3", "copy-1/__1_0.distcp"),
}
EVERY = pytest.mark.parametrize("kind", KINDS)


def of(kind: str, tmp_path: Path) -> Path:
    extract(DATA / f"{kind}.tar.xz", tmp_path)
    return tmp_path / kind / KINDS[kind][0]


def opened(path: Path) -> Checkpoint:
    return open_target(str(path), FORMATS, StoreOptions()).open()


def verified(path: Path, level: Level = Level.VALUES) -> VerifyReport:
    return verify(opened(path), VerifyOptions(level=level))


def held(path: Path) -> dict[str, bytes]:
    checkpoint = opened(path)
    return {key: read_tensor(checkpoint, key) for key in checkpoint.tensors}


def truth() -> dict[str, bytes]:
    found = load_file(DATA / "truth-3.safetensors")
    return {key: value.numpy().tobytes() for key, value in found.items()}


def require_truth(found: dict[str, bytes]) -> None:
    wanted = truth()
    assert len(wanted) == 9
    for key, value in wanted.items():
        assert found[key] == value, key


@EVERY
def test_parameters_and_moments_are_those_in_memory(kind: str, tmp_path: Path) -> None:
    path = of(kind, tmp_path)
    require_truth(held(path))
    assert opened(path).step == 3
    report = verified(path)
    assert report.code is ExitCode.OK, report.message
    assert not [f for f in report.findings if f.kind == "stray-file"]


@EVERY
def test_a_step_is_one_checkpoint_of_its_root(kind: str, tmp_path: Path) -> None:
    path = of(kind, tmp_path)
    latest = ftckpt("latest", str(path.parent), "--level", "content", cwd=tmp_path)
    assert latest.stdout.strip() == str(path)
    plan = ftckpt("gc", str(path.parent), "--keep-last", "1", "--min-survivors", "1", "--json",
                  cwd=tmp_path)  # fmt: skip
    assert plan.returncode == 0, plan.stderr
    decisions = json.loads(plan.stdout)["plan"]["decisions"]
    steps = [one["step"] for one in decisions if one["entry_class"] != "FOREIGN"]
    assert sorted(steps) == [2, 3]
    status = ftckpt("status", str(path.parent), cwd=tmp_path)
    assert f"newest     step 3, {path.name}, " in status.stdout


@EVERY
def test_a_copy_has_every_file(kind: str, tmp_path: Path) -> None:
    path = of(kind, tmp_path)
    assert ftckpt("copy", str(path), "out", cwd=tmp_path).returncode == 0
    for file in path.rglob("*"):
        if file.is_file():
            copy = tmp_path / "out" / file.relative_to(path)
            assert copy.read_bytes() == file.read_bytes()
    again = ftckpt("verify", "out", "--level", "content", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert opened(tmp_path / "out").format == opened(path).format


@EVERY
def test_conversions_lose_nothing(kind: str, tmp_path: Path) -> None:
    path = of(kind, tmp_path)
    first = held(path)
    for form in ("safetensors", "dcp"):
        done = ftckpt("convert", str(path), form, "--to", form, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        result = held(tmp_path / form)
        require_truth(result)
        # A component's name may be written otherwise; no tensor may be lost.
        assert len(result) == len(first)


@EVERY
def test_what_a_rank_lost_is_named(kind: str, tmp_path: Path) -> None:
    path = of(kind, tmp_path)
    lost = KINDS[kind][1]
    (path / lost).unlink()
    report = verified(path, Level.STRUCTURE)
    # Without a marker nothing proves that the save ended.
    marked = opened(path).commit.state is CommitState.COMMITTED
    assert report.code is (ExitCode.CORRUPT if marked else ExitCode.INCOMPLETE)
    assert lost in {f.file for f in report.findings}


@EVERY
def test_a_flipped_bit_of_a_rank_is_found(kind: str, tmp_path: Path) -> None:
    path = of(kind, tmp_path)
    file = path / KINDS[kind][1]
    held_there = sorted(
        piece.extent.offset
        for info in opened(path).tensors.values()
        for piece in info.pieces
        if piece.extent.file == KINDS[kind][1]
    )
    data = bytearray(file.read_bytes())
    data[held_there[0] if held_there else data.index(b"data.pkl") + 200] ^= 1
    file.write_bytes(data)
    report = verified(path, Level.CONTENT)
    assert report.code in (ExitCode.CORRUPT, ExitCode.UNSAFE)
    assert KINDS[kind][1] in {f.file for f in report.findings}


@pytest.mark.parametrize("kind", ["veomni", "rlinf", "rlinf_sac", "rlinf_iql", "miles", "copies"])
def test_files_of_two_steps_are_caught(kind: str, tmp_path: Path) -> None:
    path = of(kind, tmp_path)
    name = KINDS[kind][1].replace("critic/dcp", "actor/dcp")
    earlier = path.with_name(path.name.replace("3", "2"))
    shutil.copy(earlier / name, path / name)
    report = verified(path)
    assert report.code is ExitCode.CORRUPT, report.message


def test_weights_of_another_step_are_no_second_copy(tmp_path: Path) -> None:
    path = of("rlinf", tmp_path)
    for role in ("actor", "critic"):
        name = f"{role}/model_state_dict/full_weights.pt"
        shutil.copy(path.with_name("global_step_2") / name, path / name)
        report = verified(path)
        assert report.code is ExitCode.CORRUPT, role
        assert {f.file for f in report.findings if f.kind == "copy-differs"} == {name}
        (path / name).unlink()
        assert verified(path).code is ExitCode.OK


def test_a_step_without_its_actor_is_damaged(tmp_path: Path) -> None:
    path = of("rlinf", tmp_path)
    shutil.rmtree(path / "actor")
    report = verified(path, Level.STRUCTURE)
    assert report.code is ExitCode.CORRUPT
    assert "actor's store is missing" in report.message
    assert "up.weight" not in opened(path).tensors  # the critic is not taken for the model


# --- the parts ----------------------------------------------------------------------------------


def presences(path: Path) -> dict[str, Presence]:
    return {item.key: item.presence for item in resume_check(opened(path))}


def test_the_resume_check_sees_what_lies_beside(tmp_path: Path) -> None:
    found = presences(of("veomni", tmp_path))
    for key in ("weights", "moments", "scheduler", "rng-torch", "data", "step"):
        assert found[key] is Presence.PRESENT, key
    found = presences(of("pith", tmp_path))
    for key in ("rng-python", "rng-numpy", "rng-torch", "rng-cuda"):
        assert found[key] is Presence.CANNOT_TELL, key
    found = presences(of("xtuner", tmp_path))
    assert found["scheduler"] is found["data"] is Presence.PRESENT
    assert presences(of("rlinf", tmp_path))["data"] is Presence.PRESENT


def test_a_state_that_was_not_opened_is_not_called_absent(tmp_path: Path) -> None:
    path = of("veomni", tmp_path)
    for rank in range(2):  # too large to be read for its names
        torch.save(
            {"buffer": torch.zeros(2 << 20)}, path / f"extra_state/extra_state_rank_{rank}.pt"
        )
    found = presences(path)
    for key in ("scheduler", "rng-torch", "rng-numpy", "data"):
        assert found[key] is Presence.CANNOT_TELL, key


def test_the_critic_is_a_component_of_its_own(tmp_path: Path) -> None:
    path = of("rlinf", tmp_path)
    found = held(path)
    assert found["extra:critic:up.weight"] == truth()["up.weight"]
    files = {p.extent.file for p in opened(path).tensors["up.weight"].pieces if p.replica}
    assert files == {"actor/model_state_dict/full_weights.pt"}
    alone = held(path / "actor")
    require_truth(alone)


def test_a_step_of_xtuner_is_committed_by_its_last_file(tmp_path: Path) -> None:
    path = of("xtuner", tmp_path)
    assert opened(path).commit.state is CommitState.COMMITTED
    (path / "train_state.json").unlink()
    with pytest.raises(IncompleteError, match=r"train_state\.json"):
        opened(path)
    latest = ftckpt("latest", str(path.parent), cwd=tmp_path)
    assert latest.stdout.strip().endswith("step-2")


@pytest.mark.parametrize("name", ["meta.json", "model", "lr_scheduler"])
def test_what_a_step_of_miles_cannot_lack(name: str, tmp_path: Path) -> None:
    path = of("miles", tmp_path)
    (path / name).unlink() if name == "meta.json" else shutil.rmtree(path / name)
    if name == "meta.json":
        assert verified_code(path) == 5
        latest = ftckpt("latest", str(path.parent), cwd=tmp_path)
        assert latest.returncode != 0 or latest.stdout.strip().endswith("iter_0000002")
    elif name == "model":
        assert verified_code(path) in (4, 5)
    else:
        report = verified(path, Level.STRUCTURE)
        assert [f.file for f in report.findings if f.kind == "state-unknown"] == ["lr_scheduler"]


@pytest.mark.parametrize("killed", ["before the optimizer", "before meta.json"])
def test_a_save_of_miles_in_flight_is_unfinished(killed: str, tmp_path: Path) -> None:
    path = of("miles", tmp_path)
    (path / "meta.json").unlink()
    (path / "rng.pt").rename(path / "rng_rank_0.pt")
    if killed == "before the optimizer":
        (path / "rng_rank_0.pt").unlink()
        for place in ("optimizer", "lr_scheduler"):
            shutil.rmtree(path / place)
            (path / place).mkdir()
    assert verified_code(path) == 5
    assert ftckpt_json("latest", str(path.parent))["path"].endswith("iter_0000002")


def test_stores_of_a_model_and_its_optimizer_are_not_of_miles(tmp_path: Path) -> None:
    path = of("miles", tmp_path)
    for name in ("meta.json", "rng.pt"):
        (path / name).unlink()
    shutil.rmtree(path / "lr_scheduler")
    assert ftckpt_json("latest", str(path.parent))["path"] == str(path)
    assert nest_among(["model/model.safetensors", "optimizer/optimizer.pt"]) is None


def verified_code(path: Path) -> int:
    return ftckpt("verify", str(path), "--level", "structure", cwd=path.parent).returncode


def test_the_step_of_miles_is_what_its_last_file_says(tmp_path: Path) -> None:
    path = of("miles", tmp_path)
    shutil.copy(path.with_name("iter_0000002") / "meta.json", path / "meta.json")
    report = verified(path, Level.STRUCTURE)
    assert [f.message for f in report.findings if f.kind == "step-name"] == [
        "the name iter_0000003 says step 3, the content says 2"
    ]


def test_local_shards_have_the_places_of_their_moments(tmp_path: Path) -> None:
    path = of("rlinf_iql", tmp_path) / "actor/value/local_shard_checkpoint"
    require_truth(held(path))
    (path / "checkpoint_rank_1.pt").unlink()
    assert verified(path, Level.STRUCTURE).code in (ExitCode.CORRUPT, ExitCode.INCOMPLETE)


def test_prime_rl_without_its_orchestrator_is_a_step_too(tmp_path: Path) -> None:
    path = of("prime", tmp_path)
    shutil.rmtree(path / "orchestrator")  # supervised training has none
    require_truth(held(path))


@pytest.mark.parametrize("beside", ["NOTES.md", "STABLE", "evals/aime.json"])
def test_what_lies_beside_a_step_of_prime_rl_does_not_take_its_state_away(
    beside: str, tmp_path: Path
) -> None:
    path = of("prime", tmp_path)
    (path / beside).parent.mkdir(exist_ok=True)
    (path / beside).write_text("{}\n")
    progress = path / "orchestrator/progress.pt"
    assert verified(path, Level.CONTENT).code is ExitCode.OK
    assert ftckpt_json("copy", str(path), str(tmp_path / "out"))["result"]["code"] == 0
    assert (tmp_path / "out/orchestrator/progress.pt").read_bytes() == progress.read_bytes()
    progress.write_bytes(b"xxxx")
    assert ftckpt_json("verify", str(path))["result"]["code"] == ExitCode.CORRUPT


@pytest.mark.parametrize("inside", ["checkpoint-3", "log.txt", ".metadata", "__0_0.distcp"])
def test_a_folder_called_trainer_is_prime_rls_only_with_its_store(
    inside: str, tmp_path: Path
) -> None:
    prime = inside.startswith("__")  # killed before its last file
    place = tmp_path / "step_3" / "trainer"
    place.mkdir(parents=True)
    shutil.copytree(DATA.parent / "dcp/fsdp2/step-3", place / "checkpoint-3")
    for file in () if inside == "checkpoint-3" else (place / inside, place / "rank_0.txt"):
        file.write_bytes(b"x")
    if prime:
        shutil.rmtree(place / "checkpoint-3")
        (place / "rank_0.txt").unlink()
    found = nest_in(listing_of_path(tmp_path / "step_3"))
    assert (found is not None) == prime


def test_a_highest_rank_beyond_the_data_files_counts(tmp_path: Path) -> None:
    path = of("pith", tmp_path)
    shutil.copy(path / "rng-rank-00001.pt", path / "rng-rank-00003.pt")
    report = verified(path, Level.STRUCTURE)
    lost = [f.file for f in report.findings if f.kind == "missing-rank"]
    assert lost == ["rng-rank-00002.pt"]


# --- S3StorageWriter's copies ---------------------------------------------------------------------


def test_copies_are_replicas_and_compared(tmp_path: Path) -> None:
    path = of("copies", tmp_path)
    checkpoint = opened(path)
    piece = checkpoint.tensors["up.weight"].pieces
    assert {p.extent.file.partition("/")[0] for p in piece} == {"copy-0", "copy-1"}
    assert checkpoint.dialect.startswith("2 copies of all data files")
    # A copy of an earlier step is right in itself, and not a replica.
    shutil.copy(path.with_name("step-2") / "copy-1/__0_0.distcp", path / "copy-1/__0_0.distcp")
    report = verified(path)
    assert report.code is ExitCode.CORRUPT
    assert any(f.file == "copy-1/__0_0.distcp" for f in report.findings)


def test_the_copy_that_is_whole_is_read(tmp_path: Path) -> None:
    path = of("copies", tmp_path)
    (path / "copy-0" / "__0_0.distcp").unlink()
    require_truth(held(path))
    report = verified(path)
    assert report.code is ExitCode.CORRUPT  # a rank of a restart would read it
    assert "copy-0/__0_0.distcp" in report.message
    assert any("copy-1 is read" in f.message for f in report.findings)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_one_copy_loads_with_torch(tmp_path: Path) -> None:
    path = of("copies", tmp_path)
    assert ftckpt("convert", str(path), "out", "--to", "dcp", cwd=tmp_path).returncode == 0
    wanted = load_file(DATA / "truth-3.safetensors")["up.weight"]
    state = {"model": {"up.weight": torch.zeros_like(wanted)}}
    load_dcp(state, checkpoint_id=tmp_path / "out", no_dist=True)
    assert torch.equal(state["model"]["up.weight"], wanted)


@pytest.mark.parametrize("number", ["999999999", "65"])
def test_an_absurd_number_of_copies_is_refused(number: str, tmp_path: Path) -> None:
    path = of("copies", tmp_path)
    marker = path / ".metadata"
    said = f"num_copies={number}"
    data = marker.read_bytes()
    at = data.index(b"num_copies=2")
    length = data[at - 1]
    assert length == len("num_copies=2") or data[at - 4] == len("num_copies=2")
    head = bytearray(data[:at])
    head[at - 1 if length == 12 else at - 4] = len(said)
    marker.write_bytes(unframed(bytes(head) + said.encode() + data[at + 12 :]))
    report = ftckpt("verify", str(path), cwd=tmp_path)
    assert report.returncode == 4
    assert "times" in report.stderr


def unframed(data: bytes) -> bytes:
    """Leave the lengths of frames out of a pickle: they only speed its reading up."""
    out, at = data[:2], 2
    while at < len(data) and data[at : at + 1] == b"\x95":
        at += 9
    return out + data[at:]
