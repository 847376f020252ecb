"""Which layers lie on which stage: what the arguments plan, and what files decide."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.errors import CorruptError
from ftckpt.formats.megatron.job.stages import Stage, offsets, planned, settle
from ftckpt.formats.megatron.rank_files.grid import Arguments


def counts(args: dict[str, Any], pp: int, chunks: int = 1) -> list[int] | None:
    """Return the planned layers in the order of the model."""
    found = planned(Arguments(args), pp, chunks)
    if found is None:
        return None
    return [found[stage] for stage in sorted(found, key=lambda s: (s.chunk, s.pp))]


@pytest.mark.parametrize(
    ("args", "pp", "chunks", "layers"),
    [
        ({"num_layers": 8}, 2, 1, [4, 4]),
        ({"num_layers": 8}, 2, 4, [1] * 8),
        ({"num_layers": 8}, 3, 1, None),
        ({"num_layers": 10, "decoder_first_pipeline_num_layers": 1}, 4, 1, [1, 3, 3, 3]),
        (
            {
                "num_layers": 14,
                "decoder_first_pipeline_num_layers": 2,
                "decoder_last_pipeline_num_layers": 4,
            },
            4,
            2,
            [1, 2, 2, 2, 1, 2, 2, 2],
        ),
        (
            {
                "num_layers": 6,
                "account_for_embedding_in_pipeline_split": True,
                "account_for_loss_in_pipeline_split": True,
            },
            4,
            1,
            [1, 2, 2, 1],
        ),
        # The example in Megatron's own parser.
        ({"pipeline_model_parallel_layout": "Ettt|(tt|)*29,m|L"}, 32, 1, [3] + [2] * 29 + [0, 0]),
        ({"pipeline_model_parallel_layout": "Ett|t*3|tL"}, 3, 1, [2, 3, 1]),
        ({"pipeline_model_parallel_layout": "Ett|t*3|tL"}, 2, 1, None),
        (
            {"pipeline_model_parallel_layout": [["embedding", "decoder"], ["decoder", "loss"]]},
            2,
            1,
            [1, 1],
        ),
        ({"pipeline_model_parallel_layout": "(t)*9999" * 99}, 1, 1, None),
        ({"num_layers": "8"}, 2, 1, None),
    ],
)
def test_what_arguments_plan(
    args: dict[str, Any], pp: int, chunks: int, layers: list[int] | None
) -> None:
    assert counts(args, pp, chunks) == layers


@given(st.integers(1, 5), st.integers(1, 4), st.data())
def test_layers_are_numbered_once_and_chunk_by_chunk(
    pp: int, chunks: int, data: st.DataObject
) -> None:
    held = {Stage(p, v): data.draw(st.integers(0, 3)) for p in range(pp) for v in range(chunks)}
    first = offsets(held)
    order = [
        (v, p, first[Stage(p, v)] + n)
        for v in range(chunks)
        for p in range(pp)
        for n in range(held[Stage(p, v)])
    ]
    assert [number for _, _, number in order] == list(range(sum(held.values())))


STAGES = [Stage(0, 0), Stage(1, 0), Stage(2, 0)]


def test_files_that_hold_all_layers_are_believed() -> None:
    held, plan = dict(zip(STAGES, (3, 2, 1), strict=True)), dict.fromkeys(STAGES, 2)
    assert settle(held, plan, STAGES, 6) == held


def test_the_plan_knows_layers_without_a_tensor() -> None:
    held, plan = dict(zip(STAGES, (2, 1, 2), strict=True)), dict.fromkeys(STAGES, 2)
    assert settle(held, plan, STAGES, 6) == plan


def test_a_plan_that_the_files_contradict_is_no_plan() -> None:
    held, plan = dict(zip(STAGES, (3, 1, 1), strict=True)), dict.fromkeys(STAGES, 2)
    assert settle(held, plan, STAGES, 6) == held
    with pytest.raises(CorruptError):
        settle({Stage(0, 0): 3, Stage(2, 0): 1}, plan, STAGES, 6)
