"""State that follows the grid of ranks is told from state of the training, by name."""

from __future__ import annotations

import pytest

from ftckpt.comparison import DiffStatus, Follows, StateDifference
from ftckpt.comparison.state import about, mark_layout
from ftckpt.formats.grid_fields import follows


def differing(
    name: str, rank: int | None = None, a: str | None = "2", b: str | None = "4"
) -> StateDifference:
    key, title = about(name)
    return StateDifference(name, key, title, rank, DiffStatus.DIFFERENT, a, b)


RNG = "rng_state.0.random_rng_state"


@pytest.mark.parametrize(
    ("field", "hangs"),
    [
        (differing("args.world_size"), Follows.GRID),
        (differing("world_size"), Follows.GRID),
        (differing("args.rank", 3), Follows.GRID),
        (differing("args.tensor_model_parallel_size"), Follows.GRID),
        (differing("args.virtual_pipeline_model_parallel_size"), Follows.GRID),
        (differing("args.expert_tensor_parallel_num_weight_shards"), Follows.GRID),
        (differing("dp_world_size"), Follows.GRID),
        (differing("optimizer.partition_count.0"), Follows.STORAGE),
        (differing("optimizer.param_state_sharding_type"), Follows.STORAGE),
        (differing("args.padded_vocab_size"), Follows.ACROSS),
        (differing(RNG, 1), Follows.ACROSS),
        (differing("rng_state/shard_0.1_2.2.0.torch_rng_state"), Follows.ACROSS),
        (differing("extra:rank3:rng_state.0.cuda_rng_state"), Follows.ACROSS),
        (differing("optimizer.param_groups.0.params", 1, "[9, 10]", "[18]"), Follows.ACROSS),
        (differing("optimizer.param_groups.0.params", 1, "[]", None), Follows.ACROSS),
        (differing("tp_size"), Follows.GRID),
        (differing("tp_rank", 3), Follows.GRID),
        (differing("meta.rank", 3), Follows.GRID),
        (differing("shard_info.num_shards"), Follows.GRID),
        # What only looks like it.
        (differing("stage"), None),
        (differing("sampler.num_shards"), None),
        (differing("optimizer.param_groups.0.params", None, "['a.weight']", "[1]"), None),
        (differing("optimizer.param_groups.0.lr", 1), None),
        (differing("args.lr"), None),
        (differing("args.seed"), None),
        (differing("args.vocab_size"), None),
        (differing("args.q_lora_rank"), None),
        (differing("args.lora.rank"), None),
        (differing("peft.rank"), None),
        (differing("args.log_world_size_to_tensorboard"), None),
        (differing("args.micro_batch_size"), None),
        (differing("ds_config.train_batch_size"), None),
        (differing("dataloader.dp_rank_0.position", 0), None),
        (differing("torch_rng_state"), None),  # of all ranks
        (differing("iteration", 1), None),
    ],
    ids=lambda value: value.name if isinstance(value, StateDifference) else str(value),
)
def test_names(field: StateDifference, hangs: Follows | None) -> None:
    assert follows(field) is hangs


def test_what_follows_another_grid_is_a_difference_on_the_same() -> None:
    stream, rate = differing(RNG, 1), differing("args.lr")
    size, cut = differing("args.world_size"), differing("optimizer.partition_count.0")

    def marked(*fields: StateDifference, other_grid: bool = False) -> list[bool]:
        return [one.layout for one in mark_layout(fields, follows, other_grid=other_grid)]

    assert marked(stream, rate) == [False, False]
    assert marked(stream, rate, other_grid=True) == [True, False]
    assert marked(stream, rate, size) == [True, False, True]
    assert marked(stream, rate, cut) == [False, False, True]  # another cut is not another grid
