"""Which bytes are read at once."""

from __future__ import annotations

from ftckpt.extents import Extent
from ftckpt.storage.prefetch.plan import LONGEST, STAGE, Windows

GAP = 1 << 20


def _spans(windows: Windows) -> list[tuple[str, int, int]]:
    return [(one.path, one.offset, one.length) for one in windows.all]


def test_pieces_that_lie_together_are_one_window() -> None:
    extents = [Extent("a", 100 * n, 50) for n in range(400)]
    windows = Windows([*extents, Extent("a", GAP * 3, 10), Extent("b", 5, 7)], GAP)
    assert _spans(windows) == [("a", 0, 39_950), ("a", GAP * 3, 10), ("b", 5, 7)]
    assert windows.all[0].wanted == 400 * 50
    assert all(windows.holding(*extent) is windows.all[0] for extent in extents)


def test_what_no_extent_holds_is_in_no_window() -> None:
    windows = Windows([Extent("a", 0, 10), Extent("a", 20, 10)], GAP)
    (window,) = windows.all
    assert windows.holding("a", 22, 8) is window
    assert windows.holding("a", 8, 4) is None  # of two extents, or of none: as it is asked for
    assert windows.holding("a", 12, 4) is None
    assert windows.holding("a", 25, 6) is None
    assert windows.holding("a", 22, 0) is None
    assert windows.holding("b", 0, 1) is None


def test_of_extents_with_one_start_the_longest_is_found() -> None:
    windows = Windows([Extent("a", 0, 10), Extent("a", 0, 30), Extent("a", 0, 10)], GAP)
    (window,) = windows.all
    assert windows.holding("a", 2, 25) is window
    assert window.length == 30


def test_long_extents_are_left_to_themselves() -> None:
    windows = Windows([Extent("a", 0, LONGEST + 1), Extent("a", LONGEST + 1, 5)], GAP)
    assert _spans(windows) == [("a", LONGEST + 1, 5)]


def test_windows_come_in_the_order_of_use_and_are_used_up_together() -> None:
    # Tensors cut over four ranks' files: the windows of one stage are of all four.
    size = 1 << 20
    extents = [Extent(f"r{rank}", n * size, size) for n in range(16) for rank in (3, 1, 0, 2)]
    windows = Windows(extents, GAP)
    stage = [one.path for one in windows.all[:4]]
    assert stage == ["r3", "r1", "r0", "r2"]
    assert [one.path for one in windows.all] == stage * 4
    assert all(one.length == STAGE // 4 for one in windows.all)
    assert [one.number for one in windows.all] == list(range(16))
