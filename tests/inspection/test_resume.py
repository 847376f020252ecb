"""The resume check, on small made-up checkpoints that carry the names of real trainers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from ftckpt.checkpoint import (
    Box,
    Checkpoint,
    Extent,
    Kind,
    ObjectInfo,
    Piece,
    Scalar,
    StepRole,
    TensorInfo,
    Topology,
)
from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.inspection.resume import Presence, ResumeItem, resume_check
from ftckpt.inspection.training_state import TABLE
from ftckpt.storage.memory import MemoryStore
from ftckpt.storage.source import Source
from ftckpt.storage.store import Entry

PRESENT, ABSENT, CANNOT_TELL = Presence.PRESENT, Presence.ABSENT, Presence.CANNOT_TELL


@dataclass(kw_only=True)
class Named(Checkpoint):
    """A checkpoint of names only."""

    format: ClassVar[str] = "named"
    deep: Sequence[str] = ()
    counters: Sequence[Scalar] = ()

    def members(self) -> Iterable[str]:
        return ()

    def load_object(self, name: str) -> Any:
        raise AssertionError("the resume check must not decode anything")

    def scalars(self, limit: int) -> Iterator[Scalar]:
        return iter(self.counters)

    def fields(self) -> Iterable[str]:
        return self.deep or self.objects.keys()


def tensor(component: str, name: str, kind: Kind, dtype: str = "float32") -> TensorInfo:
    piece = Piece(Box((0,), (2,)), Extent("f", 0, DTYPES[dtype].nbytes(2)))
    return TensorInfo(component, name, kind, (2,), DTYPES[dtype], (piece,))


def named(
    tensors: Sequence[TensorInfo] = (),
    fields: Sequence[str] = (),
    *,
    ranks: Mapping[str, int] | None = None,
    world_size: int | None = None,
    aliases: Mapping[str, str] | None = None,
) -> Named:
    objects = {f: ObjectInfo(f, Extent("f", 0, 1), (ranks or {}).get(f)) for f in fields}
    return Named(
        source=Source(MemoryStore("memory://resume"), "", {}),
        tensors={t.key: t for t in tensors},
        objects=objects,
        aliases=aliases or {},
        topology=Topology(world_size=world_size),
        deep=tuple(fields),
    )


def verdicts(checkpoint: Checkpoint) -> dict[str, ResumeItem]:
    items = resume_check(checkpoint)
    assert [i.key for i in items] == [row.key for row in TABLE]
    return {i.key: i for i in items}


def presence(checkpoint: Checkpoint, *keys: str) -> list[Presence]:
    found = verdicts(checkpoint)
    return [found[k].presence for k in keys]


WEIGHTS = [tensor("model", "a", Kind.PARAM), tensor("model", "b", Kind.PARAM)]
ADAM = [
    tensor("optimizer", name, kind)
    for name in ("a", "b")
    for kind in (Kind.EXP_AVG, Kind.EXP_AVG_SQ)
]


def test_weights_alone_lack_everything_else() -> None:
    found = verdicts(named(WEIGHTS))
    assert found.pop("weights").presence is PRESENT
    assert {i.presence for i in found.values()} == {ABSENT}
    assert found["masters"].needed is False  # float32 weights need none
    assert all(i.consequence and i.reason for i in found.values())


def test_every_row_has_a_key_of_its_own_and_a_consequence() -> None:
    assert len({row.key for row in TABLE}) == len(TABLE)
    assert all(row.consequence.endswith(".") for row in TABLE)


class TestMoments:
    def test_both_moments_for_every_parameter(self) -> None:
        item = verdicts(named(WEIGHTS + ADAM))["moments"]
        assert (item.presence, item.missing) == (PRESENT, ())
        assert item.where == ("exp_avg:a", "exp_avg_sq:a")

    def test_a_parameter_without_one_moment_is_listed(self) -> None:
        item = verdicts(named(WEIGHTS + ADAM[:-1]))["moments"]
        assert (item.presence, item.missing) == (CANNOT_TELL, ("b",))
        assert item.reason == "1 of 2 parameters have no moments (b): frozen, buffers, or lost"

    def test_lion_keeps_the_first_moment_alone(self) -> None:
        lion = [tensor("optimizer", n, Kind.EXP_AVG) for n in ("a", "b")]
        assert presence(named(WEIGHTS + lion), "moments") == [PRESENT]

    def test_sgd_keeps_a_momentum_buffer(self) -> None:
        sgd = [tensor("optimizer", f"{n}.momentum_buffer", Kind.OTHER) for n in ("a", "b")]
        item = verdicts(named(WEIGHTS + sgd))["moments"]
        assert (item.presence, item.missing) == (PRESENT, ())
        assert verdicts(named(WEIGHTS + sgd[:1]))["moments"].missing == ("b",)

    def test_step_counters_are_no_moments(self) -> None:
        steps = [tensor("optimizer", f"{n}.step", Kind.OTHER) for n in ("a", "b")]
        assert presence(named(WEIGHTS + steps), "moments") == [CANNOT_TELL]

    def test_names_that_no_weight_has_cannot_be_matched(self) -> None:
        indexed = [
            tensor("optimizer", f"0.{i}", kind)
            for i in range(2)
            for kind in (Kind.EXP_AVG, Kind.EXP_AVG_SQ)
        ]
        assert presence(named(WEIGHTS + indexed), "moments") == [CANNOT_TELL]

    def test_buffers_integers_and_tied_weights_need_none(self) -> None:
        extra = [
            tensor("model", "mask", Kind.BUFFER),
            tensor("model", "seen", Kind.PARAM, "int64"),
            tensor("model", "head", Kind.PARAM),
        ]
        item = verdicts(named([*WEIGHTS, *extra, *ADAM], aliases={"head": "a"}))["moments"]
        assert (item.presence, item.missing) == (PRESENT, ())


class TestMasters:
    HALF: ClassVar = [tensor("model", n, Kind.PARAM, "bfloat16") for n in ("a", "b")]

    def test_sixteen_bit_weights_without_masters(self) -> None:
        item = verdicts(named(self.HALF))["masters"]
        assert (item.presence, item.needed) == (ABSENT, True)

    def test_all_and_some(self) -> None:
        masters = [tensor("optimizer", n, Kind.MASTER) for n in ("a", "b")]
        assert presence(named(self.HALF + masters), "masters") == [PRESENT]
        item = verdicts(named(self.HALF + masters[:1]))["masters"]
        assert (item.presence, item.missing) == (CANNOT_TELL, ("b",))

    def test_a_scaler_is_due_with_float16_only(self) -> None:
        assert verdicts(named(self.HALF))["scaler"].needed is False
        half = [tensor("model", "a", Kind.PARAM, "float16")]
        assert verdicts(named(half))["scaler"].needed is True


# Names as the trainers write them, and what they show.
NESTED = ["lr_scheduler.last_epoch", "train_state.step", "rng.rank_0", "rng.rank_1",
          "dataloader.dp_rank_0", "dataloader.dp_rank_1"]  # fmt: skip
CASES = {
    "dcp, nested": (NESTED, {"scheduler": PRESENT, "step": PRESENT, "data": PRESENT,
                             "rng-python": CANNOT_TELL, "rng-cuda": CANNOT_TELL}),
    "dcp, one level": (["rng", "scheduler"], {"rng-torch": CANNOT_TELL, "scheduler": PRESENT}),
    "torchtitan": (["lr_scheduler.last_epoch", "train_state.step", "dataloader.dp_rank_0"],
                   {"scheduler": PRESENT, "rng-torch": ABSENT, "data": PRESENT}),
    "hf trainer": (["scheduler.pt.last_epoch", "rng_state_0.pth.python", "rng_state_0.pth.numpy",
                    "rng_state_0.pth.cpu", "rng_state_0.pth.cuda", "trainer_state.global_step",
                    "trainer_state.epoch", "scaler.pt"],
                   {"scheduler": PRESENT, "rng-python": PRESENT, "rng-numpy": PRESENT,
                    "rng-torch": PRESENT, "rng-cuda": PRESENT, "step": PRESENT,
                    "data": CANNOT_TELL, "scaler": PRESENT}),
    "accelerate": (["random_states_0.pkl.random_state", "random_states_0.pkl.numpy_random_seed",
                    "random_states_0.pkl.torch_manual_seed", "random_states_0.pkl.step",
                    "random_states_0.pkl.torch_cuda_manual_seed", "scheduler.bin", "sampler.bin"],
                   {"rng-python": PRESENT, "rng-numpy": PRESENT, "rng-torch": PRESENT,
                    "rng-cuda": PRESENT, "scheduler": PRESENT, "data": PRESENT,
                    # its own count of calls, which starts again with each pass over the data
                    "step": CANNOT_TELL}),
    "accelerate, closed pickles": (["random_states_0.pkl", "random_states_1.pkl"],
                                   {"rng-python": CANNOT_TELL, "rng-numpy": CANNOT_TELL}),
    "lightning": (["epoch", "global_step", "lr_schedulers.0.last_epoch",
                   "loops.fit_loop.epoch_loop.scheduler_progress.total.ready",
                   "loops.fit_loop.epoch_loop.batch_progress.total.ready"],
                  {"step": PRESENT, "scheduler": PRESENT, "data": CANNOT_TELL,
                   "rng-torch": ABSENT}),
    "lightning, no scheduler": (["loops.fit_loop.epoch_loop.scheduler_progress.total.ready"],
                                {"scheduler": ABSENT}),
    "verl": (["rank_0.lr_scheduler.last_epoch", "rank_0.rng.cpu", "rank_0.rng.numpy",
              "rank_0.rng.random.0"],
             {"scheduler": PRESENT, "rng-python": PRESENT, "rng-numpy": PRESENT,
              "rng-torch": PRESENT, "rng-cuda": ABSENT}),
    "megatron": (["common_state/shard_0_1", "rng_state/shard_0.0_1.2", "rng_state/shard_0.1_1.2"],
                 {"scheduler": CANNOT_TELL, "step": CANNOT_TELL, "rng-cuda": CANNOT_TELL}),
    "megatron, common state open": (
        ["common_state.opt_param_scheduler.num_steps", "common_state.iteration",
         "common_state.args.consumed_train_samples"],
        {"scheduler": PRESENT, "step": PRESENT, "data": PRESENT}),
    "megatron, arguments are no scaler": (["common_state.args.loss_scale"], {"scaler": ABSENT}),
    "plain dict": (["epoch", "step", "scheduler.last_epoch", "rng.torch", "rng.python"],
                   {"step": PRESENT, "rng-torch": PRESENT, "rng-python": PRESENT,
                    "rng-numpy": ABSENT, "data": CANNOT_TELL}),
    "words that only look alike": (
        ["layers.0.cpu_offload", "args.cuda_graph", "python_version", "hyper_parameters.seed"],
        {"rng-python": ABSENT, "rng-torch": ABSENT, "rng-cuda": ABSENT, "scheduler": ABSENT}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_names_of_real_trainers(case: str) -> None:
    fields, expected = CASES[case]
    found = verdicts(named(WEIGHTS, fields))
    assert {key: found[key].presence for key in expected} == expected


def test_files_that_nothing_opened_may_hold_state() -> None:
    checkpoint = named(WEIGHTS)
    entries = {n: Entry(n, 1) for n in ("common.pt", "scheduler.pt", "notes.txt")}
    checkpoint.source = Source(checkpoint.source.store, "", entries)
    found = verdicts(checkpoint)
    assert found["scheduler"].presence is PRESENT
    assert found["step"].presence is found["data"].presence is CANNOT_TELL
    assert found["step"].where == ("common.pt",)


@pytest.mark.parametrize(
    ("nbytes", "torch", "cuda"),
    [(5056, PRESENT, ABSENT), (16, ABSENT, PRESENT), (17, CANNOT_TELL, CANNOT_TELL)],
)
def test_the_size_of_a_generator_state_says_whose_it_is(
    nbytes: int, torch: Presence, cuda: Presence
) -> None:
    piece = Piece(Box((0,), (nbytes,)), Extent("f", 0, nbytes))
    state = TensorInfo("extra:rng", "rank_0", Kind.OTHER, (nbytes,), DTYPES["uint8"], (piece,))
    assert presence(named([*WEIGHTS, state]), "rng-torch", "rng-cuda") == [torch, cuda]


def test_ranks_are_counted_against_the_world() -> None:
    fields = [f"rng_state_{r}.pth.numpy" for r in range(3)]
    item = verdicts(named(WEIGHTS, fields, world_size=4))["rng-numpy"]
    assert (item.presence, item.ranks, item.world_size) == (PRESENT, 3, 4)
    assert "3 of 4 ranks" in item.reason


def test_the_rank_of_an_object_counts_where_its_name_is_silent() -> None:
    checkpoint = named(WEIGHTS, ["x.rng.numpy", "y.rng.numpy"], ranks={"x.rng.numpy": 0,
                       "y.rng.numpy": 7})  # fmt: skip
    assert verdicts(checkpoint)["rng-numpy"].ranks == 2


def test_rng_tensors_of_the_ranks_count_by_their_keys() -> None:
    rng = [tensor(f"extra:rank{r}", "rng.cpu", Kind.OTHER, "uint8") for r in range(2)]
    item = verdicts(named(WEIGHTS + rng, world_size=2))["rng-torch"]
    assert (item.presence, item.ranks) == (PRESENT, 2)


def test_the_optimizers_count_alone_is_no_step_counter_of_the_trainer() -> None:
    checkpoint = named(WEIGHTS + ADAM)
    checkpoint.counters = [Scalar("f", "a.step", 7, StepRole.OPTIMIZER)]
    item = verdicts(checkpoint)["step"]
    assert item.presence is CANNOT_TELL
    assert "7" in item.reason
