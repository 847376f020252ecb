"""Parts of a save that were not read, that one step lacks, or that only two numbers tell."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

import ftckpt
from ftckpt.discovery.recognise import Listing
from ftckpt.errors import ExitCode, FtckptError
from ftckpt.formats.catalog import Pieces
from ftckpt.storage.state_files import is_text_of_state
from ftckpt.strict_json import is_cut
from tests.json_run import ftckpt_json

OK, CORRUPT, INCOMPLETE = ExitCode.OK, ExitCode.CORRUPT, ExitCode.INCOMPLETE
UNVERIFIED, UNSUPPORTED = ExitCode.UNVERIFIED, ExitCode.UNSUPPORTED
STEPS = (10, 20, 30, 40)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def store(folder: Path, state: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    save(state, storage_writer=FileSystemWriter(folder, single_file_per_rank=True), no_dist=True)


def dcp(step: Path, number: int) -> None:
    """A DCP store alone, as lingua, slime and many others write it."""
    weight = torch.full((4, 4), float(number))
    moments = {"exp_avg": weight * 0, "exp_avg_sq": weight * 0, "step": torch.tensor(number)}
    store(step, {"model": {"a.weight": weight}, "optim": {"state": {"a.weight": moments}}})


def lingua(step: Path, number: int) -> None:
    """facebookresearch/lingua lingua/checkpoint.py: each rank's own JSON beside the store."""
    dcp(step, number)
    for rank in range(2):
        said = {"step": number, "scheduler": {"last_epoch": number, "base_lrs": [0.1]}}
        (step / f"train_state_{rank:05d}.json").write_text(json.dumps(said))
    (step / "params.json").write_text('{"name": "llama"}')


def slime(step: Path, number: int) -> None:
    """THUDM/slime backends/fsdp_utils/checkpoint.py."""
    dcp(step, number)
    torch.save({"torch": torch.get_rng_state()}, step / "rng.pt")
    (step / "meta.json").write_text(json.dumps({"iteration": number}))


def prime(step: Path, number: int) -> None:
    """PrimeIntellect-ai/prime-rl: the trainer's store, and the orchestrator's progress."""
    dcp(step / "trainer", number)
    (step / "orchestrator").mkdir()
    torch.save({"step": number}, step / "orchestrator" / "progress.pt")


def veomni(step: Path, number: int, *, ranks: int = 2) -> None:
    """ByteDance-Seed/VeOmni checkpoint/layout.py."""
    weight = torch.full((4, 4), float(number))
    store(step / "model" / "ckpt", {"a.weight": weight})
    moments = {"exp_avg": weight * 0, "exp_avg_sq": weight * 0}
    store(step / "model" / "optimizer", {"state": {"a.weight": moments}})
    for folder in ("loader", "extra_state"):
        (step / folder).mkdir()
        for rank in range(ranks):
            said: dict[str, Any] = {"global_step": number, "dataloader": {"_num_yielded": number}}
            if folder == "extra_state":
                said = {"global_step": number, "rng_state": {"torch_cpu": torch.get_rng_state()}}
            torch.save(said, step / folder / f"rank_{rank}.pt")
    manifest = {"global_step": number, "world_size": ranks}
    (step / "checkpoint_manifest.json").write_text(json.dumps(manifest))
    from safetensors.torch import save_file

    (step / "hf_ckpt").mkdir()
    save_file({"a.weight": weight.bfloat16()}, step / "hf_ckpt" / "model.safetensors")
    (step / "hf_ckpt" / "config.json").write_text('{"model_type": "qwen3"}')


Writes = Callable[[Path, int], None]


def run(tmp_path: Path, write: Writes, name: str = "step_{}") -> list[Path]:
    steps = [tmp_path / "run" / name.format(number) for number in STEPS]
    for step, number in zip(steps, STEPS, strict=True):
        write(step, number)
    return steps


def verified(path: Path) -> tuple[int, set[str]]:
    answer = ftckpt_json("verify", str(path))
    return answer["result"]["code"], {one["kind"] for one in answer["findings"]}


def chosen(root: Path, *flags: str) -> tuple[int, str]:
    answer = ftckpt_json("latest", str(root), *flags)
    return answer["result"]["code"], str(answer.get("path") or "").rpartition("/")[2]


def presence(path: Path) -> dict[str, str]:
    answer = ftckpt_json("inspect", str(path))
    return {one["key"]: one["presence"] for one in answer["resume"]}


# what was not read


def test_a_text_that_was_not_read_may_hold_a_schedule(tmp_path: Path) -> None:
    steps = run(tmp_path, lingua)
    found = presence(steps[3])
    assert {found[key] for key in ("scheduler", "rng-numpy", "data")} == {"cannot tell"}
    assert (found["weights"], found["moments"]) == ("present", "present")
    for rank in range(2):
        (steps[3] / f"train_state_{rank:05d}.json").unlink()
    assert presence(steps[3])["scheduler"] == "absent"


@pytest.mark.parametrize(
    ("name", "may"),
    [
        ("train_state_00001.json", True),
        ("orchestrator/scheduler.yaml", True),
        ("0003.json", True),
        ("config.json", False),
        ("params.json", False),
        ("special_tokens_map.json", False),
        ("model.safetensors.index.json", False),
        ("eval_results.json", False),
        ("log.txt", False),
        ("README.md", False),
        ("a.pt", False),
    ],
)
def test_which_texts_may_hold_state(name: str, may: bool) -> None:
    assert is_text_of_state(name) is may


def test_a_store_in_a_part_is_read_whatever_its_folder_is_called(tmp_path: Path) -> None:
    steps = run(tmp_path, veomni, "global_step_{}")
    code, kinds = verified(steps[3])
    assert (code, "unknown-part" in kinds, "count-unknown" in kinds) == (OK, False, False)
    assert presence(steps[3])["weights"] == "present"
    ftckpt.convert(str(steps[3]), str(tmp_path / "out"), to="safetensors", only="model")
    made = ftckpt.open(str(tmp_path / "out"))
    assert {key: info.dtype.name for key, info in made.tensors.items()} == {"a.weight": "float32"}


def test_a_generator_of_one_rank_is_no_weight(tmp_path: Path) -> None:
    step = tmp_path / "step_10"
    veomni(step, 10, ranks=1)
    assert presence(step)["rng-torch"] == "present"
    torch.save({"rng_state": {"cpu": torch.get_rng_state()}}, step / "extra_state" / "rank_0.pt")
    found = ftckpt.open(str(step / "extra_state"))
    assert {info.component for info in found.tensors.values()} == {"extra:rank0"}


def test_weights_that_no_format_knows_may_be_the_model_beside_an_export(tmp_path: Path) -> None:
    step = tmp_path / "step_10"
    veomni(step, 10)
    shutil.rmtree(step / "model" / "ckpt")
    (step / "model" / "ckpt").mkdir()
    (step / "model" / "ckpt" / "weights.msgpack").write_bytes(b"\x81\xa1a\x01" * 9)
    code, kinds = verified(step)
    assert (code, {"unknown-part", "unsupported"} <= kinds) == (UNSUPPORTED, True)
    with pytest.raises(FtckptError) as refused:
        ftckpt.convert(str(step), str(tmp_path / "out"), to="safetensors", only="model")
    assert refused.value.exit_code == UNSUPPORTED
    assert presence(step)["masters"] == "cannot tell"


def test_a_lost_ranks_file_of_a_job_that_shows_its_ranks(tmp_path: Path) -> None:
    steps = run(tmp_path, veomni, "global_step_{}")
    (steps[3] / "loader" / "rank_1.pt").unlink()
    assert verified(steps[3])[0] == INCOMPLETE
    assert chosen(steps[0].parent)[1] in (steps[2].name, "")


# what the steps beside have


@pytest.mark.parametrize("rank", [0, 1])
def test_a_ranks_text_is_missed_beside_its_siblings(rank: int, tmp_path: Path) -> None:
    steps = run(tmp_path, lingua)
    (steps[3] / f"train_state_{rank:05d}.json").unlink()
    code, kinds = verified(steps[3])
    # One rank wrote the store: whether it was one of two, nothing says of what is numbered from 0.
    if rank == 0:
        assert (code, "missing-part" in kinds) == (INCOMPLETE, True)
        assert chosen(steps[0].parent) == (OK, steps[2].name)
    else:
        assert "missing-part" not in kinds


@pytest.mark.parametrize(
    ("write", "lost"),
    [(slime, "rng.pt"), (slime, "meta.json"), (prime, "orchestrator/progress.pt")],
)
def test_state_of_any_kind_is_missed(write: Writes, lost: str, tmp_path: Path) -> None:
    steps = run(tmp_path, write)
    before = verified(steps[3])
    assert before[0] in (OK, UNVERIFIED)
    (steps[3] / lost).unlink()
    code, kinds = verified(steps[3])
    assert code == (UNVERIFIED if before[0] and lost == "meta.json" else INCOMPLETE)
    assert "missing-part" in kinds
    assert chosen(steps[0].parent)[1] != steps[3].name


def test_an_export_that_others_have_is_a_warning(tmp_path: Path) -> None:
    steps = run(tmp_path, lingua)
    for step in (steps[0], steps[2]):
        (step / "consolidated").mkdir()
        torch.save({"model": {"a.weight": torch.ones(4, 4)}}, step / "consolidated" / "all.pth")
    assert verified(steps[1]) == (OK, verified(steps[1])[1])
    assert "missing-part" not in verified(steps[1])[1]
    assert verified(steps[3])[0] == OK


def test_logs_of_every_step_are_not_missed(tmp_path: Path) -> None:
    steps = run(tmp_path, lingua)
    for step in steps[:3]:
        (step / "logs").mkdir()
        for name in ("events.out.tfevents.1", "trainer_log.json", "report.html", "state.json"):
            (step / "logs" / name).write_text("{}")
        (step / "eval_results.json").write_text("{}")
    assert not verified(steps[3])[1] & {"missing-part", "state-unknown"}


def test_a_text_of_state_that_is_cut_is_damage(tmp_path: Path) -> None:
    steps = run(tmp_path, lingua)
    text = steps[3] / "train_state_00001.json"
    whole = text.read_bytes()
    text.write_bytes(whole[: len(whole) * 2 // 3])
    assert verified(steps[3])[0] == CORRUPT
    assert chosen(steps[0].parent) == (OK, steps[2].name)
    text.write_bytes(whole)
    assert verified(steps[3])[0] == OK


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        (b'{"a": 1, "b": [1, 2', True),
        (b'{"a": "b', True),
        (b'{"a": tr', True),
        (b'{"a": "\\u00', True),
        (b"[1, 2", True),
        (b'{"a": 1}', False),
        (b'{"a": 1}\n{"a": 2}\n', False),
        (b"{'a': 1}", False),
        (b'{"a": 1, // why\n}', False),
        (b"step: 3", False),
        (b"", False),
        (bytes(64), True),
    ],
)
def test_the_beginning_of_a_json_text_is_told_from_other_texts(text: bytes, cut: bool) -> None:
    assert is_cut(text) is cut


# pieces of one save


def piece(path: Path, step: int, rank: int) -> None:
    flat = torch.full((16,), float(step + rank))
    torch.save({"model": {"flat_param_0": flat}, "extra_state": {"num_updates": step}}, path)


def metaseq(root: Path, saves: dict[str, int], *, shards: int = 2) -> None:
    """facebookresearch/metaseq trainer.py: one file of each model-parallel rank and shard."""
    root.mkdir()
    for name, step in saves.items():
        for part in range(2):
            for shard in range(shards):
                end = f"-shard{shard}" if shards > 1 else ""
                file = root / f"{name}-model_part-{part}{end}.pt"
                piece(file, step, 2 * part + shard)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize(
    "saves",
    [
        {"checkpoint_best": 3000, "checkpoint_last": 4000},
        {"checkpoint_1_1000": 1000, "checkpoint_1_2000": 2000, "checkpoint_last": 2000},
        {"reshard": 143000},
    ],
)
def test_pieces_told_by_two_numbers_are_never_handed_out(
    saves: dict[str, int], shards: int, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    metaseq(root, saves, shards=shards)
    assert chosen(root) == (UNSUPPORTED, "")
    for file in root.iterdir():
        answer = ftckpt_json("verify", str(file))
        assert answer["result"]["code"] == UNSUPPORTED
        assert "is a piece of a save, beside" in answer["result"]["message"]
        assert ftckpt_json("inspect", str(file))["result"]["code"] == UNSUPPORTED
    with pytest.raises(FtckptError) as refused:
        ftckpt.convert(str(file), str(tmp_path / "out"), to="safetensors", only="model")
    assert refused.value.exit_code == UNSUPPORTED
    planned = ftckpt_json("gc", str(root), "--keep-last", "1", "--min-survivors", "1")
    assert planned["result"]["code"] in (OK, UNSUPPORTED)
    assert not planned.get("drop")


def test_the_last_and_the_best_are_two_saves(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    for name, step in (("best", 3000), ("last", 4000)):
        for shard in range(2):
            piece(root / f"checkpoint_{name}-shard{shard}.pt", step, shard)
    assert chosen(root) == (OK, "checkpoint_last-shard0.pt")
    assert len(ftckpt_json("ls", str(root))["checkpoints"]) == 2
    best = ftckpt.open(str(root / "checkpoint_best-shard1.pt"))
    assert (best.step, len(best.source.entries)) == (3000, 2)
    (root / "checkpoint_best-shard1.pt").unlink()
    assert verified(root / "checkpoint_last-shard0.pt")[0] == OK
    assert verified(root / "checkpoint_best-shard0.pt")[0] == UNSUPPORTED
    assert chosen(root) == (OK, "checkpoint_last-shard0.pt")


@pytest.mark.parametrize(
    ("names", "pieces"),
    [
        (("a-part-0.pt", "a-part-1.pt"), True),
        (("best.th", "best.th.1", "best.th.2"), True),
        (("net_0_0.pt", "net_0_1.pt", "net_1_0.pt", "net_1_1.pt"), True),
        (("a-tp1-pp1.pt",), True),
        (("a-tp0-pp0.pt",), False),  # a job of one rank
        (("a-part-1.pt", "a-part-2.pt"), False),
        (("lora_rank8.pt", "lora_rank16.pt"), False),
        (("model_stage0.pt", "model_stage1.pt"), False),  # of the training, perhaps
        (("model_seed0_fold0.pt", "model_seed0_fold1.pt"), False),
        (("ep0-ba0-rank0.pt", "ep0-ba1-rank0.pt"), False),
        (("checkpoint_0_0.pt", "checkpoint_0_1.pt", "checkpoint_1_0.pt"), False),
        (("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"), False),
        (("mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"), False),  # read as one
        (("model_rank_0.pt", "model_rank_1.pt"), False),  # likewise
    ],
)
def test_names_that_tell_pieces(names: tuple[str, ...], pieces: bool) -> None:
    empty = Listing({}, (), lambda *_: b"", lambda _: empty)
    for name in names:
        listing = replace(empty, single=name, beside=names.__contains__)
        assert (Pieces().recognise(listing) is not None) is pieces
