"""The non-tensor state of a checkpoint as fields, whatever a file puts there."""

from __future__ import annotations

import argparse
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from ftckpt.comparison import Field
from ftckpt.errors import FtckptError, UnsafeError
from ftckpt.formats.families.vocabulary import is_vocabulary, recorded_rows, vocabulary_of
from ftckpt.formats.state.fields import state_fields
from tests.builders.checkpoints import open_checkpoint


def saved(path: Path, **state: Any) -> Path:
    torch.save({"model": {"w": torch.ones(2)}, **state}, path)
    return path


def read(path: Path) -> dict[str, Field]:
    found = list(state_fields(open_checkpoint(path)))
    assert all(isinstance(one, Field) for one in found)
    return {one.name: one for one in found if isinstance(one, Field)}


def test_objects_are_taken_apart_to_their_leaves(tmp_path: Path) -> None:
    state = {"a": {"b": [1, {"c": 2.5}], 7: "x"}, "order": [3, 1, 2], "pair": (1, 2), "none": None}
    found = read(saved(tmp_path / "a.pt", trainer=state))
    assert {name: one.shown for name, one in found.items()} == {
        "trainer.a.b.0": "1", "trainer.a.b.1.c": "2.5", "trainer.a.7": "'x'",
        "trainer.order": "[3, 1, 2]", "trainer.pair": "(1, 2)", "trainer.none": "None",
    }  # fmt: skip


def test_namespaces_and_pickles_inside_are_taken_apart(tmp_path: Path) -> None:
    position = pickle.dumps({"sampler": {"yielded": 6}, "seed": None})
    args = argparse.Namespace(lr=0.1, inner=argparse.Namespace(depth=2))
    found = read(saved(tmp_path / "a.pt", loader={"rank_0": position}, args=args))
    assert {name: one.shown for name, one in found.items()} == {
        "loader.rank_0.sampler.yielded": "6", "loader.rank_0.seed": "None",
        "args.lr": "0.1", "args.inner.depth": "2",
    }  # fmt: skip


@pytest.mark.parametrize(
    "data",
    [b"\x80.", b"\x80\4N.N.", b"\x80\4]."],
    ids=["no pickle", "more after it", "empty"],
)
def test_bytes_that_are_not_taken_apart_are_one_field(tmp_path: Path, data: bytes) -> None:
    (one,) = read(saved(tmp_path / "a.pt", loader={"x": data})).values()
    assert (one.name, one.shown) == ("loader.x", f"{len(data)} bytes")


@pytest.mark.parametrize(
    ("one", "two"),
    [(0.0, -0.0), (1, 1.0), (1, True), (True, "True"), (None, "None"), ("1", 1), ("é", "e"),
     ([1], (1,)), ([1], [1.0]), (b"1", "1"), (1 << 70, (1 << 70) + 1)],
    ids=repr,
)  # fmt: skip
def test_values_of_other_bits_or_types_differ(tmp_path: Path, one: Any, two: Any) -> None:
    def digests(inside: bool) -> list[bytes]:
        found = [
            read(saved(tmp_path / f"{n}.pt", x={"y": (value, 1) if inside else value, "z": 0}))
            for n, value in enumerate((one, two))
        ]
        return [fields["x.y"].digest for fields in found if "x.y" in fields]

    assert len(set(digests(inside=True))) == 2
    assert len(set(digests(inside=False))) == 2


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.0, "\n", [1, "a"], (("b",), 3)])
def test_equal_values_of_two_files_are_equal(tmp_path: Path, value: Any) -> None:
    found = [
        read(saved(tmp_path / f"{n}.pt", padding={"p": "x" * n}, x={"y": value}))["x.y"]
        for n in range(2)
    ]
    assert found[0] == found[1]


def test_long_and_deep_values_are_shown_in_a_few_words(tmp_path: Path) -> None:
    deep: Any = ()
    for _ in range(50):
        deep = (deep,)
    state = {"text": "x" * 10_000, "deep": deep, "wide": tuple(range(9999)), "number": 1 << 9999}
    for one in read(saved(tmp_path / "a.pt", x=state)).values():
        assert len(one.shown) <= 48, one.name


def test_ranks_are_told_from_names(tmp_path: Path) -> None:
    found = list(state_fields(open_checkpoint(saved(tmp_path / "a.pt", rank_3={"seed": 5}))))
    assert [(one.name, one.rank) for one in found if isinstance(one, Field)] == [("seed", 3)]


def test_an_object_that_cannot_be_read_gives_its_error_and_the_others_their_fields(
    tmp_path: Path,
) -> None:
    checkpoint = open_checkpoint(saved(tmp_path / "a.pt", a={"x": 1}, b={"y": 2}))
    whole = checkpoint.load_object

    def load(name: str) -> Any:
        if name == "a":
            raise UnsafeError("hostile")
        return whole(name)

    checkpoint.load_object = load  # type: ignore[method-assign]
    found = list(state_fields(checkpoint))
    errors = [one for one in found if isinstance(one, FtckptError)]
    assert [(error.tensor, error.message) for error in errors] == [("a", "hostile")]
    assert [one.name for one in found if isinstance(one, Field)] == ["b.y"]


# --- the vocabulary -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "yes"),
    [
        ("model.embed_tokens.weight", True),
        ("lm_head.weight", True),
        ("embedding.word_embeddings.weight", True),
        ("output_layer.weight", True),
        ("model.layers.0.mlp.up_proj.weight", False),
        ("decoder.layers.0.mlp.linear_fc1.weight", False),
    ],
)
def test_which_parameters_have_a_vocabulary_s_rows(name: str, yes: bool) -> None:
    assert is_vocabulary(name) is yes


@pytest.mark.parametrize(
    ("said", "rows"),
    [
        ({"vocab_size": 999, "padded_vocab_size": 1024}, 999),
        ({"vocab_size": 999, "padded_vocab_size": 1024, "vocab_extra_ids": 0}, 999),
        ({"vocab_size": 999, "padded_vocab_size": 1024, "vocab_extra_ids": 5}, None),
        ({"vocab_size": 1024, "padded_vocab_size": 1024}, None),
        ({"vocab_size": None, "padded_vocab_size": 1024}, None),
        ({"vocab_size": 0, "padded_vocab_size": 1024}, None),
        ({"vocab_size": 999}, None),
        ({}, None),
    ],
)
def test_true_rows_are_what_was_recorded(
    tmp_path: Path, said: dict[str, Any], rows: int | None
) -> None:
    args = argparse.Namespace(hidden_size=8, **said)
    checkpoint = open_checkpoint(saved(tmp_path / "a.pt", args=args))
    plain = open_checkpoint(saved(tmp_path / "b.pt", x=1))
    assert recorded_rows(checkpoint) == rows
    assert recorded_rows(plain) is None
    assert vocabulary_of(plain, checkpoint).true_rows == rows
    assert vocabulary_of(plain, checkpoint, 3).true_rows == 3
