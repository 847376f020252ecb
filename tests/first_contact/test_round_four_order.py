"""Saves whose order their content tells, and files that look like saves and are none.

DETR (`checkpoint.pth` beside `checkpoint0299.pth`, COCO results in `eval/`), Stable Cascade,
audiocraft with FSDP, NequIP; and others of the same kinds.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.json_run import ftckpt_json

SHAPES = {"embed.weight": (6, 4), "layers.0.weight": (4, 4), "layers.0.bias": (4,)}


def network(fill: float = 1.0) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, fill) for name, shape in SHAPES.items()}


def adam(fill: float = 1.0, step: int = 3) -> dict[str, Any]:
    weights = [torch.nn.Parameter(one) for one in network(fill).values()]
    optimizer = torch.optim.Adam(weights)
    for one in weights:
        one.grad = torch.ones_like(one)
    optimizer.step()
    for state in optimizer.state.values():
        state["step"] = torch.tensor(float(step))
    return dict(optimizer.state_dict())


def save(path: Path, state: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path)


def answer(*words: str) -> dict[str, Any]:
    return dict(ftckpt_json(*words)["result"])


def code(*words: str) -> int:
    return int(answer(*words)["code"])


def newest(root: Path) -> tuple[int, str]:
    """Return the code of `latest` and the name that it prints."""
    said = ftckpt_json("latest", str(root))
    return int(said["result"]["code"]), Path(said.get("path") or "").name


def plan(root: Path, *words: str) -> dict[str, bool]:
    """Return what gc keeps, by name."""
    made = ftckpt_json("gc", str(root), *(words or ("--keep-last", "2")))
    return {one["name"]: one["keep"] for one in made["plan"]["decisions"]}


# ---------------------------------------------------------------------------------------------
# What the contents record decides


@pytest.mark.parametrize("numbered", ["checkpoint{:04}.pth", "checkpoint_{}.pth", "model_{}.pth"])
@pytest.mark.parametrize("key", ["epoch", "cur_epoch", "iepoch"])
def test_an_unnumbered_save_is_as_new_as_it_records(
    tmp_path: Path, numbered: str, key: str
) -> None:
    for epoch in (99, 199, 299):
        save(tmp_path / numbered.format(epoch), {"model": network(epoch), key: epoch})
    plain = numbered.partition("{")[0].rstrip("_") + ".pth"
    save(tmp_path / plain, {"model": network(349), key: 349})
    assert newest(tmp_path) == (0, plain)
    save(tmp_path / plain, {"model": network(150), key: 150})
    assert newest(tmp_path) == (0, numbered.format(299))


def test_every_verb_takes_the_same_newest(tmp_path: Path) -> None:
    for epoch in (99, 199, 299):
        save(tmp_path / f"checkpoint{epoch:04}.pth", {"model": network(), "epoch": epoch})
    save(tmp_path / "checkpoint.pth", {"model": network(), "epoch": 349})
    for verb in ("inspect", "verify"):
        assert "checkpoint.pth" in json.dumps(ftckpt_json(verb, str(tmp_path)))
    health = ftckpt_json("status", str(tmp_path))
    assert "checkpoint.pth" in json.dumps(health["runs"][0]["newest"])
    assert plan(tmp_path)["checkpoint.pth"]


def test_without_a_record_the_unnumbered_save_may_be_the_newest(tmp_path: Path) -> None:
    for epoch in (99, 199):
        save(tmp_path / f"checkpoint{epoch:04}.pth", {"model": network(epoch)})
    save(tmp_path / "checkpoint.pth", {"model": network(349)})
    assert newest(tmp_path)[0] == 6
    (tmp_path / "checkpoint.pth").rename(tmp_path / "checkpoint_last.pth")
    assert newest(tmp_path) == (0, "checkpoint_last.pth")


def test_a_setting_of_the_run_orders_nothing(tmp_path: Path) -> None:
    for epoch in (1, 2, 3):
        save(tmp_path / f"epoch_{epoch}.pth", {"model": network(epoch), "epochs": 90})
    assert newest(tmp_path) == (0, "epoch_3.pth")


def test_slots_are_ordered_by_what_they_record(tmp_path: Path) -> None:
    for slot, epoch in ((0, 40), (1, 41), (2, 38), (3, 39)):
        save(tmp_path / f"model_s{slot}.pth", {"model": network(epoch), "epoch": epoch})
    assert newest(tmp_path) == (0, "model_s1.pth")


# ---------------------------------------------------------------------------------------------
# Results are no checkpoints


def results(epoch: int) -> dict[str, Any]:
    return {"params": {"iou": "bbox"}, "counts": [10, 101], "precision": [0.5, epoch], "date": "x"}


def test_a_folder_of_results_is_no_root(tmp_path: Path) -> None:
    for epoch in (99, 199):
        save(tmp_path / f"checkpoint{epoch:04}.pth", {"model": network(), "epoch": epoch})
    for name in ("000", "050", "latest"):
        save(tmp_path / f"eval/{name}.pth", results(1))
    assert newest(tmp_path) == (0, "checkpoint0199.pth")
    assert code("verify", str(tmp_path), "--all") == 0
    for words in (
        ("latest", str(tmp_path / "eval")),
        ("verify", str(tmp_path / "eval")),
        ("verify", str(tmp_path / "eval/latest.pth")),
        ("inspect", str(tmp_path / "eval/050.pth")),
    ):
        assert code(*words) == 13
    assert code("status", str(tmp_path / "eval")) != 0
    assert all(plan(tmp_path / "eval", "--keep-last", "1").values())


def test_tensors_of_an_evaluation_are_no_state(tmp_path: Path) -> None:
    held = {"precision": torch.rand(3, 2), "recall": torch.rand(3), "counts": [3, 2]}
    for epoch in (10, 20):
        save(tmp_path / f"{epoch}.pth", held)
    assert newest(tmp_path)[0] == 13
    assert code("verify", str(tmp_path / "20.pth")) == 13
    save(tmp_path / "model_5.pth", {"model": network(), "step": 5})
    assert newest(tmp_path) == (0, "model_5.pth")


def test_two_places_of_saves_are_both_named(tmp_path: Path) -> None:
    save(tmp_path / "model_best.pth", {"model": network()})
    save(tmp_path / "ft/step_10.pth", {"model": network(), "step": 10})
    said = answer("latest", str(tmp_path))
    assert said["code"] == 2
    for name in ("ft", "model_best.pth"):
        assert name in json.dumps(said)


# ---------------------------------------------------------------------------------------------
# No word makes a model of what is none


def trainer_state() -> dict[str, Any]:
    average = {"decay": 0.99, "num_updates": 7, "shadow_params": list(network(2).values())}
    random = torch.get_rng_state()
    return {"optim": adam(), "ema": average, "rng_state": random, "cumulative_wall": 3.5}


@pytest.mark.parametrize("word", ["state_dict", "model", "params", "snapshot"])
def test_a_state_below_a_word_for_the_model_is_sorted(tmp_path: Path, word: str) -> None:
    path = tmp_path / "trainer.pth"
    save(path, {word: trainer_state(), "train_idcs": torch.arange(9)})
    lines = ftckpt_json("inspect", str(path), "--tensors")
    assert not [k for k in json.dumps(lines).split('"') if k.startswith("model:")]
    out = str(tmp_path / "out")
    assert code("convert", str(path), out, "--to", "safetensors", "--only", "model") in (2, 9, 13)
    assert not os.path.exists(out)


@pytest.mark.parametrize(
    "state",
    [
        {"model": {"exp_avg": network(), "exp_avg_sq": network()}},
        {"model": {"decay": 0.9, "shadow_params": network()}},
        {"state_dict": {"cpu": torch.get_rng_state()}},
        {"model": adam()},
    ],
)
def test_moments_averages_and_generators_are_no_model(tmp_path: Path, state: Any) -> None:
    save(tmp_path / "last.pt", {**state, "epoch": 3})
    out = str(tmp_path / "out")
    words = ("convert", str(tmp_path / "last.pt"), out, "--to", "safetensors", "--only", "model")
    assert code(*words) in (2, 9, 13)


def test_the_model_inside_such_a_state_is_the_model(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    held = {**trainer_state(), "model": network(5)}
    save(tmp_path / "last.pt", {"state_dict": held, "epoch": 3})
    out = tmp_path / "out"
    words = ("convert", str(tmp_path / "last.pt"), str(out), "--to", "safetensors")
    assert code(*words, "--only", "model") == 0
    (file,) = out.glob("*.safetensors")
    found = load_file(file)
    assert found.keys() == network().keys()
    assert all(torch.equal(found[name], value) for name, value in network(5).items())


# ---------------------------------------------------------------------------------------------
# An average is a companion


def with_averages(root: Path, names: tuple[str, str], numbers: tuple[int, ...]) -> None:
    for number in numbers:
        for name, more in zip(names, (0.0, 0.5), strict=True):
            save(root / name.format(number), network(number + more))


NAMES = [
    ("ckpt{}.pth", "ckpt_ema_{}.pth"),
    ("epoch_{}.pt", "epoch_{}_ema.pt"),
    ("model_{}.pt", "ema_{}.pt"),
    ("net_epoch{:03}.pt", "net_swa_epoch{:03}.pt"),
]


@pytest.mark.parametrize("names", NAMES)
def test_an_average_moves_nothing(tmp_path: Path, names: tuple[str, str]) -> None:
    with_averages(tmp_path, names, (100, 200, 300))
    assert newest(tmp_path) == (0, names[0].format(300))
    (tmp_path / names[1].format(300)).unlink()
    assert newest(tmp_path) == (0, names[0].format(300))
    save(tmp_path / "last_model.pth", network(349))
    assert newest(tmp_path) == (0, "last_model.pth")


@pytest.mark.parametrize("names", NAMES)
def test_gc_keeps_or_drops_an_average_with_its_weights(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    with_averages(tmp_path, names, (100, 200, 300, 400))
    (tmp_path / names[1].format(300)).unlink()
    kept = plan(tmp_path)
    for number in (100, 200, 400):
        weights, average = (name.format(number) for name in names)
        assert kept[weights] == kept[average], kept
    assert kept[names[0].format(400)]


def test_a_pinned_average_keeps_its_weights(tmp_path: Path) -> None:
    with_averages(tmp_path, NAMES[0], (100, 200, 300, 400))
    assert code("pin", str(tmp_path / "ckpt_ema_100.pth"), "--reason", "paper") == 0
    kept = plan(tmp_path)
    assert kept["ckpt_ema_100.pth"]
    assert kept["ckpt100.pth"]


def test_two_networks_are_still_told_apart(tmp_path: Path) -> None:
    for number in (100, 200):
        save(tmp_path / f"G_{number}.pth", {"up.weight": torch.full((4, 4), float(number))})
        save(tmp_path / f"D_{number}.pth", {"down.weight": torch.full((4, 2), float(number))})
    assert newest(tmp_path)[0] == 2


# ---------------------------------------------------------------------------------------------
# A rank's flat pieces are no model


def pieces(rank: int, fill: float = 1.0) -> dict[str, torch.Tensor]:
    flat = torch.cat([one.reshape(-1) for one in network(fill).values()])
    half, at, found = -(-len(flat) // 2), 0, {}
    for name, one in network(fill).items():
        start, end = max(at, rank * half), min(at + one.numel(), (rank + 1) * half)
        found[name] = flat[start:end].clone() if end > start else flat.new_empty(0)
        at += one.numel()
    return found


def test_a_ranks_file_with_empty_pieces_is_refused_alone(tmp_path: Path) -> None:
    for rank in (0, 1):
        path = tmp_path / f"only{rank}.th"
        save(path, {"model": pieces(rank), "optimizer": adam(), "history": []})
        for verb in ("verify", "inspect"):
            assert code(verb, str(path)) == 13
        out = str(tmp_path / "out")
        words = ("convert", str(path), out, "--to", "safetensors", "--only", "model")
        assert code(*words) == 13


def flat_halves(rank: int) -> dict[str, torch.Tensor]:
    return {n: one.reshape(-1).chunk(2)[rank].clone() for n, one in network().items()}


@pytest.mark.parametrize(
    ("name", "beside"),
    [
        ("checkpoint.th", "checkpoint.th.1"),
        ("checkpoint.th.1", "checkpoint.th"),
        ("state_rank1.pt", None),
    ],
)
def test_flat_pieces_beside_another_rank_are_refused(
    tmp_path: Path, name: str, beside: str | None
) -> None:
    save(tmp_path / name, {"model": flat_halves(0)})
    if beside is not None:
        save(tmp_path / beside, {"model": flat_halves(1)})
    assert code("verify", str(tmp_path / name)) == 13


def test_flat_pieces_beside_the_whole_of_the_same_names_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "last.th", {"model": flat_halves(0), "best": {"model": network()}})
    assert code("verify", str(tmp_path / "last.th")) == 13


def test_a_small_model_of_vectors_is_a_model(tmp_path: Path) -> None:
    flat = {"norm.weight": torch.ones(4), "linear.weight": torch.ones(8), "bias": torch.ones(4)}
    save(tmp_path / "last.pt", {"model": flat})
    assert code("verify", str(tmp_path / "last.pt")) == 0


def test_the_refusal_of_a_root_does_not_send_to_a_piece(tmp_path: Path) -> None:
    for rank in (0, 1):
        save(tmp_path / f"checkpoint.th{f'.{rank}' if rank else ''}", {"model": pieces(rank)})
    said = answer("latest", str(tmp_path))
    assert said["code"] == 13
    assert "by itself" not in json.dumps(said)


# ---------------------------------------------------------------------------------------------
# What is tried first is not the newest


def test_a_damaged_file_that_is_tried_first_is_not_called_the_newest(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from ftckpt.commands.cli.app import main

    for number in ("20k", "40k"):
        save_file(network(), tmp_path / f"generator_{number}.safetensors")
    save_file(network(), tmp_path / "generator.safetensors")
    old = tmp_path / "generator_20k.safetensors"
    old.write_bytes(old.read_bytes()[:-20])
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(tmp_path)])
    assert ended.value.code == 4
    assert "newest" not in capfd.readouterr().err
