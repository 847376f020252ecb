"""Plans as documents, policies as files, metrics by what lies beside a checkpoint."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from ftckpt.checkpoint import CommitState
from ftckpt.errors import RefusedError, UsageError
from ftckpt.retention.document import dump_plan, load_plan, plan_id, rows
from ftckpt.retention.policy import DeleteLimit, Metric, Policy, flag
from ftckpt.retention.policy.decide import decide
from ftckpt.retention.policy.file import parse_policy_file, tier_of
from ftckpt.retention.policy.metrics import metric_of
from ftckpt.retention.policy.plan import RetentionPlan
from ftckpt.retention.scan.entries import EntryClass, EntryContents, RootEntry, SharedFile
from tests.builders.small_format import read, write
from tests.retention.history import History, any_policy


def some_plan(seed: int) -> RetentionPlan:
    choose = Random(seed)
    run = History(choose)
    run.advance(20)
    contents = EntryContents(2, 30, 10, (SharedFile("1:2", 20, 3, 1),), run.now, "ab" * 16)
    entries = [
        replace(e, contents=contents if choose.random() < 0.5 else None) for e in run.entries
    ]
    return decide(entries, any_policy(choose), run.now, url="/ckpt/\udce9", notes=["a note"])


@pytest.mark.parametrize("seed", range(40))
def test_a_plan_comes_back_whole(seed: int) -> None:
    plan = some_plan(seed)
    data = json.dumps(dump_plan(plan), indent=seed % 2).encode()
    assert load_plan(data, "plan.json") == plan
    assert plan_id(load_plan(data, "plan.json")) == plan_id(plan)


def test_a_plan_that_was_changed_is_refused() -> None:
    document = dump_plan(some_plan(7))
    document["decisions"][0]["keep"] = not document["decisions"][0]["keep"]
    with pytest.raises(UsageError, match="changed since it was made"):
        load_plan(json.dumps(document).encode(), "plan.json")


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b'{"schema": "ftckpt.gc-plan/9"}', b"[" * 100_000, b"\xff"]
)
def test_what_is_no_plan_is_refused(data: bytes) -> None:
    with pytest.raises(UsageError, match=r"plan\.json is not a plan of this version"):
        load_plan(data, "plan.json")


def test_rows_say_what_a_table_shows() -> None:
    entries = [
        RootEntry("step-2", "", EntryClass.COMMITTED, 2, 100.0, checked=True),
        RootEntry(
            "step-1", "", EntryClass.COMMITTED, 1, 10.0, commit=CommitState.NO_MARKER, checked=True
        ),
        RootEntry("x", "", EntryClass.FOREIGN, why="no format knows it"),
        RootEntry("step-3", "", EntryClass.COMMITTED, 3, 7300.0, checked=True),
    ]
    plan = decide(entries, Policy(keep_last=1, min_survivors=1), 100.0)
    assert rows(plan) == [
        ("-", "x", "-", None, "FOREIGN", "names", "keep", "foreign: no format knows it"),
        (
            *("3", "step-3", "in 2 h", None, "COMMITTED", "names", "keep"),
            "future: its time lies in the future",
        ),
        (
            *("2", "step-2", "0 s", None, "COMMITTED", "names", "keep"),
            "newest: the highest step; keep-last: newest of the last 1",
        ),
        ("1", "step-1", "90 s", None, "NO MARKER", "names", "drop", "expired: no rule keeps it"),
    ]


def test_the_flag_that_a_refusal_names_allows_it() -> None:
    entries = [
        RootEntry(f"s{i}", "", EntryClass.COMMITTED, i, i * 60.0, checked=True) for i in range(200)
    ]
    policy = Policy(keep_last=1)
    with pytest.raises(RefusedError) as first:
        decide(entries, policy, 1e6).require()
    assert first.value.hint == "--min-survivors 1 allows it"
    policy = replace(policy, min_survivors=1)
    with pytest.raises(RefusedError) as second:
        decide(entries, policy, 1e6).require()
    assert second.value.hint == "--max-delete 199 allows it"
    decide(entries, replace(policy, max_delete=DeleteLimit.parse("199")), 1e6).require()


@pytest.mark.parametrize(
    "values",
    [
        {"keep_last": 0},
        {"keep_every": -1},
        {"min_survivors": 0},
        {"keep_within": float("nan")},
        {"keep_within": -1.0},
        {"keep_best": 1},
        {"metric": Metric("loss", largest=False)},
        {"reclaim": 0},
    ],
)
def test_a_policy_that_means_nothing_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Policy(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["loss", "smallest:loss", "min:", ""])
def test_the_direction_of_a_metric_is_never_guessed(text: str) -> None:
    with pytest.raises(UsageError, match="smallest or the largest"):
        Metric.parse(text)


@pytest.mark.parametrize("text", ["", "-1", "1.5", "101%", "50 %", "ten"])
def test_limits_are_whole_numbers(text: str) -> None:
    with pytest.raises(UsageError):
        DeleteLimit.parse(text)


def test_rules_are_named_by_their_flags() -> None:
    policy = Policy(keep_last=1, keep_tags=("a",), keep_best=1, metric=Metric("loss", False))
    assert policy.rules == ("--keep-last", "--keep-best", "--keep-tag")
    assert (flag("keep_tags"), flag("reclaim"), flag("max_delete")) == (
        "--keep-tag",
        "--free",
        "--max-delete",
    )


TIERS = b"""
[[tier]]
name = "nvme"
roots = ["/local/*", "/scratch/*"]
keep-last = 3
keep-within = "6h"
min-survivors = 3

[[tier]]
name = "bucket"
roots = ["s3://*"]
keep-every = 10000
keep-tag = ["milestone", "paper"]
keep-best = 2
metric = "min:eval_loss"
max-delete = "20%"
"""


def test_a_root_belongs_to_the_tier_that_matches_it() -> None:
    tiers = parse_policy_file(TIERS, "retention.toml")
    local = Policy(keep_last=3, keep_within=21600.0, min_survivors=3)
    assert tier_of(tiers, "/local/run7/", "retention.toml").policy == local
    assert tier_of(tiers, "s3://bucket/run7", "retention.toml").policy == Policy(
        keep_every=10000,
        keep_tags=("milestone", "paper"),
        keep_best=2,
        metric=Metric("eval_loss", largest=False),
        max_delete=DeleteLimit(20, percent=True),
    )
    assert tier_of(tiers, "/elsewhere", "retention.toml", "nvme").name == "nvme"
    for url, name in (("/elsewhere", None), ("/local/x", "tape")):
        with pytest.raises(UsageError) as error:
            tier_of(tiers, url, "retention.toml", name)
        assert error.value.hint == "name one: --tier nvme, bucket"
    twice = parse_policy_file(TIERS + b'[[tier]]\nname = "all"\nroots = ["*"]\n', "r.toml")
    with pytest.raises(UsageError, match=r"nvme and all of r\.toml both match"):
        tier_of(twice, "/local/x", "r.toml")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("keep-last = 3", "made of"),
        ("", "made of"),
        ("tier = 3", "made of"),
        ("tier = [3]", "written as"),
        ("[[tier]]\nkeep-last = 3", "has no name"),
        ('[[tier]]\nname = "a"\nkeep-lst = 3', "keep-lst of tier a"),
        ('[[tier]]\nname = "a"\nkeep-last = "3"', "not a whole number"),
        ('[[tier]]\nname = "a"\nkeep-last = true', "not a whole number"),
        ('[[tier]]\nname = "a"\nkeep-last = 0', r"--keep-last 0.*tier a"),
        ('[[tier]]\nname = "a"\nkeep-within = 3', "not text"),
        ('[[tier]]\nname = "a"\nkeep-within = "3"', "needs its unit"),
        ('[[tier]]\nname = "a"\nkeep-tag = "x"', "not a list"),
        ('[[tier]]\nname = "a"\nroots = [1]', "not a list"),
        ('[[tier]]\nname = "a"\n[[tier]]\nname = "a"', "one name"),
        ("[[tier", "not TOML"),
    ],
)
def test_a_policy_file_that_is_not_understood_is_refused(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse_policy_file(text.encode(), "retention.toml")


def test_metrics_are_found_where_trainers_put_them(tmp_path: Path) -> None:
    names = ("step-1", "step-2", "step-3", "epoch=3-val_loss=0.25-step=4", "step-5")
    for name in names:
        write(tmp_path, name, 1)
    (tmp_path / "step-1/metrics.json").write_text('{"loss": 2, "nan": NaN, "text": "1"}')
    history = [{"step": 1, "eval_loss": 9.0}, {"step": 2, "eval_loss": 1.5}, {"step": 2}, 7]
    (tmp_path / "step-2/trainer_state.json").write_text(json.dumps({"log_history": history}))
    (tmp_path / "step-3/metrics.json").write_text("{")
    (tmp_path / "step-5/metrics.json").mkdir()
    root = read(tmp_path)
    entries = {c.path: c.entry for c in root.candidates}

    def value(name: str, metric: str, step: int | None = None) -> float | None:
        return metric_of(root, entries[name], metric, step)

    assert value("step-1", "loss") == 2.0
    assert [value("step-1", name) for name in ("nan", "text", "other")] == [None] * 3
    assert value("step-2", "loss", 2) == 1.5
    assert value("step-2", "loss", 3) is None
    assert value("step-3", "loss") is None
    assert value("step-5", "loss") is None
    assert value("epoch=3-val_loss=0.25-step=4", "val_loss") == 0.25
    assert value("epoch=3-val_loss=0.25-step=4", "loss") is None
