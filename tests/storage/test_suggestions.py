"""What an error about a path that is not there says of what is."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

import pytest

from ftckpt.discovery.resolve import locate, open_root, open_target
from ftckpt.errors import NotFoundError, UnsupportedError, UsageError
from ftckpt.formats.catalog import FORMATS
from ftckpt.storage import StoreOptions, open_store
from ftckpt.storage import suggestions as nearby
from ftckpt.storage.suggestions import existing, hint_for_absent, hint_for_name, hint_for_place
from tests.builders.small_format import Small, write

OPTIONS = StoreOptions()


def test_near_names_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run7" / "step-1000").mkdir(parents=True)
    assert hint_for_absent("run7/step-1OOO") == "did you mean run7/step-1000?"
    assert hint_for_absent(f"{tmp_path}/rnu7/step-1000/") == f"did you mean {tmp_path}/run7?"
    assert hint_for_absent("run7/other") == "run7 is there, and holds no other"
    assert hint_for_absent("elsewhere/step-1") == f"it was looked for in {tmp_path}"
    assert hint_for_absent("/elsewhere/step-1") == "/ is there, and holds no elsewhere"
    assert hint_for_absent("s3:/bucket/run7") == "a URL has two slashes: s3://bucket/run7"
    assert hint_for_absent("file:/run7/x") == "a URL has two slashes: file:///run7/x"
    assert hint_for_absent("s3://bucket/run7") == ""
    with pytest.raises(UsageError) as slip:
        locate("s3//bucket/run7", OPTIONS)
    assert slip.value.hint == "a URL has a colon: s3://bucket/run7"
    (tmp_path / "s3").mkdir()  # a folder may be called so
    assert open_store("s3//bucket/run7").traits.local
    assert hint_for_place("s3:/bucket/run7") == "a URL has two slashes: s3://bucket/run7"
    assert hint_for_place(f"{tmp_path}/gs:/run7/x") == "a URL has two slashes: gs://run7/x"
    assert hint_for_place(f"{tmp_path}/a b/step-1") == f"mkdir -p '{tmp_path}/a b'"
    (tmp_path / "file").touch()
    assert hint_for_place("file/run7/step-1") == ""
    assert existing("elsewhere/step-1") == "."
    assert existing("run7/step-1/x/") == "run7"
    for path, near in (("run7/step-100", "step-1000"), ("run/@5", "run7"), ("rnu7@5", "run7")):
        with pytest.raises(NotFoundError) as caught:
            locate(path, OPTIONS)
        assert near in caught.value.hint


@pytest.mark.parametrize(
    ("asked", "near"),
    [
        ("step-1200", "step-1000 and {}step-1500"),
        ("step-100", "step-500"),
        ("step-9000", "step-2000"),
        ("step1500", "step-1500"),
        ("step-0001500", "step-1500"),
        ("Step_700", "step-500 and {}step-1000"),
        ("epoch-2", "epoch-3"),
    ],
)
def test_the_nearest_steps_are_named_by_number(tmp_path: Path, asked: str, near: str) -> None:
    """By spelling step-2000 is as near to step-1200 as step-1000 is."""
    for name in ("step-500", "step-1000", "step-1500", "step-2000", "epoch-3", "logs"):
        (tmp_path / name).mkdir()
    shown = near.format(f"{tmp_path}/")
    assert hint_for_absent(f"{tmp_path}/{asked}") == f"the nearest by number: {tmp_path}/{shown}"


def test_a_word_after_at_that_is_no_step(tmp_path: Path) -> None:
    write(tmp_path, "step-9", 9)
    for word, meant in (("step-0009", "9"), ("newst", "latest"), ("best", "latest")):
        with pytest.raises(NotFoundError) as caught:
            locate(f"{tmp_path}@{word}", OPTIONS)
        said = f"after @ comes the number of a step, or latest: {tmp_path}@{meant}"
        assert caught.value.hint == said
    assert locate(f"{tmp_path}@newest", OPTIONS).which == "latest"
    (tmp_path / "run@newest").mkdir()  # what is there as typed goes first
    assert locate(f"{tmp_path}/run@newest", OPTIONS).which == ""


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "notes.txt"])
def test_a_file_of_a_checkpoint_names_the_checkpoint(tmp_path: Path, name: str) -> None:
    (tmp_path / ".metadata").write_bytes(b"\x80\x02N.")
    # As torch writes them, a data file begins like a file of torch.save.
    (tmp_path / "__0_0.distcp").write_bytes(b"PK\3\4" + bytes(26) + b"archive/data.pkl")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UnsupportedError) as caught:
        open_target(f"{tmp_path}/{name}", FORMATS, OPTIONS)
    assert caught.value.hint == f"name {tmp_path}"


def test_a_pointer_names_its_root(tmp_path: Path) -> None:
    write(tmp_path, "step-9", 9)
    (tmp_path / "latest").write_text("step-9")
    (tmp_path / "notes").write_text("step-9")
    path = f"{tmp_path}/latest"
    with pytest.raises(UsageError) as caught:
        open_root(locate(path, OPTIONS), [Small()])
    assert caught.value.hint == f"name {tmp_path}"
    with pytest.raises(UnsupportedError) as unknown:
        open_target(f"{tmp_path}/notes", [Small()], OPTIONS)
    assert unknown.value.hint == ""


@pytest.mark.parametrize(
    ("part", "whole"),
    [
        ("iter_0000003/mp_rank_00_000", "iter_0000003"),
        ("step_universal/zero", "step_universal"),
        ("step_universal/zero/layers.0.weight", "step_universal"),
    ],
)
def test_a_part_of_a_checkpoint_is_no_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, whole: str
) -> None:
    (tmp_path / part).mkdir(parents=True)
    (tmp_path / part / "fp32.pt").touch()
    if "zero" in part:
        (tmp_path / "step_universal/zero/optimizer_state.pt").touch()
    monkeypatch.chdir(tmp_path)
    for typed in (part, f"{part}/", f"./{part}"):
        with pytest.raises(UsageError, match="is one part of the checkpoint") as caught:
            open_root(locate(typed, OPTIONS), FORMATS)
        assert caught.value.hint == f"name {whole}"
    with pytest.raises(UsageError) as absolute:
        open_target(f"{tmp_path}/{part}", FORMATS, OPTIONS)
    assert absolute.value.hint == f"name {tmp_path}/{whole}"
    monkeypatch.chdir(tmp_path / part)
    with pytest.raises(UsageError):
        open_target(".", FORMATS, OPTIONS)


def test_what_only_lies_in_a_checkpoint_is_no_part_of_it(tmp_path: Path) -> None:
    write(tmp_path, "final", 9)
    write(tmp_path / "final", "variants/a", None)
    (tmp_path / "final/tokenizer").mkdir()
    assert open_root(locate(f"{tmp_path}/final/variants", OPTIONS), [Small()]).candidates
    with pytest.raises(NotFoundError) as caught:
        open_target(f"{tmp_path}/final/tokenizer", [Small()], OPTIONS)
    assert caught.value.hint == f"name {tmp_path}/final"


def test_a_part_in_memory_asks_for_nothing_above_it() -> None:
    store = open_store("memory://parts/iter_1/mp_rank_00")
    store.put("model_optim_rng.pt", b"")
    with pytest.raises(UsageError) as caught:
        open_target("memory://parts/iter_1/mp_rank_00", FORMATS, OPTIONS)
    assert caught.value.hint == "name memory://parts/iter_1"


def test_near_names_of_tensors() -> None:
    names = ["layers.0.attn.wq.weight", "layers.1.attn.wq.weight", "norm.weight"]
    assert hint_for_name("nrom.weight", names) == "did you mean norm.weight?"
    assert hint_for_name("module.norm.weight", names) == "did you mean norm.weight?"
    two = "layers.0.attn.wq.weight or layers.1.attn.wq.weight"
    assert hint_for_name("*.wq", names) == f"did you mean {two}?"
    assert hint_for_name("layers.0.atn.wq.weight", names) == f"did you mean {two}?"
    assert hint_for_name("lm_head", names) == hint_for_name("*", []) == ""
    assert hint_for_name("w", names) == ""  # a letter is in most


def test_of_many_names_few_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparing letter by letter takes a tenth of a millisecond for each."""
    parts = ("attn.wq", "attn.wk", "attn.wv", "attn.wo", "mlp.w1", "mlp.w2", "mlp.w3", "norm")
    names = [f"layers.{n}.{part}.weight" for n in range(300) for part in parts]
    compared: list[int] = []

    def counting(asked: str, names: list[str], most: int, near: float) -> list[str]:
        compared.append(len(names))
        return get_close_matches(asked, names, most, near)

    monkeypatch.setattr(nearby, "get_close_matches", counting)
    for asked, meant in (
        ("layers.299.atn.wq.weight", "layers.299.attn.wq.weight"),
        ("leyers.210.mlp.w2.wieght", "layers.210.mlp.w2.weight"),
        ("layer.31.mlp.w3.weights", "layers.31.mlp.w3.weight"),
    ):
        assert hint_for_name(asked, names).startswith(f"did you mean {meant}")
    assert hint_for_name("tok_embeddings.weight", names) == ""
    assert len(compared) == 4
    assert max(compared) <= 256
