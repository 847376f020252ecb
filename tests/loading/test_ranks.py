"""Jobs of several ranks: every format at every number of them, training on, and bad input."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict

import ftckpt
from tests import campaign
from tests.builders.jobs import run_job
from tests.formats.dcp.fsdp2_loading import trained

from .samples import DATA, FLAGS, USUAL, WAYS, samples
from .table import COLUMNS, read

dcp: Any = checkpoint
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

HERE = Path(__file__).parent


def answer_of(ranks: int, program: str, asked: Any, place: Path) -> Any:
    """Let a job of some ranks do what is asked; return what rank 0 wrote."""
    (place / "asked.json").write_text(json.dumps(asked))
    run_job(ranks, HERE / program, place / "asked.json", place / "answer.json")
    return json.loads((place / "answer.json").read_text())


def chosen() -> list[str]:
    """Return the samples that are tried: some of each format, or all in a campaign."""
    return [place for _, place in samples()] if campaign.examples(0, 1) else list(USUAL)


@pytest.mark.parametrize("ranks", COLUMNS)
def test_every_format_is_loaded_at_every_number_of_ranks(ranks: int, tmp_path: Path) -> None:
    asked = [
        {"place": str(DATA / one), "ways": WAYS, "flags": FLAGS.get(one, {})} for one in chosen()
    ]
    answer = answer_of(ranks, "conformance_job.py", asked, tmp_path)
    found = answer["found"]
    table = read()
    for one in chosen():
        ways = found[str(DATA / one)]
        assert set(ways.values()) == {str(table[one][ranks])}, (one, ways)
        assert len(ways) == (1 if ranks == 1 else 4 if ranks == 4 else 3)
    # A delta is decoded, Orbax's chunks have forms of their own, a file is compressed as a whole.
    by_all = {
        str(DATA / one) for one in USUAL if one.startswith(("delta", "orbax", "by_hand/comp"))
    }
    for one in USUAL:
        place = str(DATA / one)
        assert answer["opened"][place] == (ranks if place in by_all else 1), place


def test_every_format_is_in_the_table() -> None:
    assert {place for _, place in samples()} == set(read())
    assert {form for form, place in samples() if place in USUAL} == {f for f, _ in samples()}


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with one state as several makers save it."""
    root = tmp_path_factory.mktemp("saves")
    model, optimizer = trained()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=str(root / "dcp"))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()},
               root / "plain.pt")  # fmt: skip
    lightning = {f"model.{name}": value for name, value in model.state_dict().items()}
    torch.save({"state_dict": lightning, "optimizer_states": [optimizer.state_dict()]},
               root / "last.ckpt")  # fmt: skip
    return root


@pytest.mark.parametrize("ranks", [2, 4])
def test_jobs_train_on(ranks: int, saves: Path, tmp_path: Path) -> None:
    own = str(saves / "dcp")
    asked = [
        {"name": "dcp", "place": own, "torch": own,
         "ways": ["fsdp2", "fsdp2-flat", "tp", "fsdp2-one", "ddp-one", "tp-one"]},
        {"name": "plain", "place": str(saves / "plain.pt"), "torch": own,
         "ways": ["fsdp2", "fsdp2-flat", "ddp-one"]},
        {"name": "lightning", "place": str(saves / "last.ckpt"), "torch": own,
         "ways": ["fsdp2", "tp-one"]},
    ]  # fmt: skip
    found = answer_of(ranks, "training_job.py", asked, tmp_path)
    assert len(found) == 11
    assert set(found.values()) == {"equal"}, found


def test_bad_input_is_an_error_on_every_rank(saves: Path, tmp_path: Path) -> None:
    opened = ftckpt.open_checkpoint(str(saves / "dcp"))
    place = opened.payload(opened.tensors["embed.weight"].pieces[0]).extent
    last = place.offset + place.length - 1  # in the rows of the last rank alone
    for name in ("flipped", "lost", "cut", "metadata", "quiet"):
        shutil.copytree(saves / "dcp", tmp_path / name)
    for name in ("flipped", "quiet"):
        data = bytearray((tmp_path / name / place.file).read_bytes())
        data[last] ^= 1
        (tmp_path / name / place.file).write_bytes(data)
    (tmp_path / "lost" / place.file).unlink()
    with (tmp_path / "cut" / place.file).open("r+b") as file:
        file.truncate(place.offset + 8)
    (tmp_path / "metadata" / ".metadata").unlink()
    kinds = {
        "flipped": "CorruptError", "lost": "CorruptError", "cut": "TruncatedError|CorruptError",
        "metadata": "IncompleteError|NotFoundError|UnsupportedError",
        "absent": "NotFoundError", "other model": "RuntimeError", "network": "UnavailableError",
    }  # fmt: skip
    cases: list[dict[str, Any]] = [
        {"name": name.replace(" ", "_"), "place": str(tmp_path / name)} for name in kinds
    ]
    cases[5] |= {"place": str(saves / "dcp"), "more": {"head.weight": 3}}
    nobody = {"endpoint": "http://127.0.0.1:9", "anonymous": True, "retry_seconds": 0.2}
    cases[6] |= {"place": "s3://bucket/run", "stores": nobody}
    quiet = {"name": "quiet", "place": str(tmp_path / "quiet"), "flags": {"level": "structure"}}
    cases += [quiet, {"name": "killed", "place": str(saves / "dcp")}]
    (tmp_path / "asked.json").write_text(json.dumps(cases))
    ranks = 3
    texts = run_job(ranks, HERE / "damage_job.py", tmp_path / "asked.json")
    for rank, text in enumerate(texts):
        said = dict(
            line.split(" ", 1) for line in text.splitlines()
            if line.split(" ")[0] in {case["name"] for case in cases}
        )  # fmt: skip
        for name, wanted in kinds.items():
            errors = json.loads(said[name.replace(" ", "_")])
            assert any(one.split(":")[0] in wanted.split("|") for one in errors.values()), errors
        assert "embed.weight" in said["flipped"]
        assert said["quiet"] == "loaded"
        assert ("killed" in said) == (rank < ranks - 1)
        if rank < ranks - 1:
            assert said["killed"] != "loaded"
