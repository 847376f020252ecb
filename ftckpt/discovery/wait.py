"""Wait for a save in flight before choosing, so that a restart does not lose its work."""

from __future__ import annotations

import time
from collections.abc import Callable

from ftckpt.checkpoint import Checkpoint
from ftckpt.errors import ExitCode, FtckptError

from .candidates import look
from .open_part import open_part
from .roots import Candidate, Root
from .select import Check, Note, Selection, SelectionRules, select

# Seconds between looks: a save that is nearly done is seen soon, a long one costs few requests.
_FIRST, _GROWTH, _LONGEST = 0.5, 1.5, 30.0


def select_waiting(
    read: Callable[[], Root],
    check: Check,
    rules: SelectionRules,
    timeout: float,
    note: Note = lambda _: None,
    *,
    say: Note | None = None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Selection:
    """Do as `selection.select`, but while a newer checkpoint is uncommitted, wait for it first.

    Args:
        read: reads the root anew.
        check: see `select`.
        rules: see `select`.
        timeout: seconds to wait in all after the first look; then the best that there is, wins.
        note: see `select`.
        say: told what is waited for; None for `note`.
        sleep: waits a number of seconds.
        clock: returns seconds of a monotonic clock.

    Raises:
        FtckptError: the root could not be listed.
    """
    end: float | None = None
    passed: set[str] = set()

    def check_once(checkpoint: Checkpoint, root: Root) -> tuple[ExitCode, str]:
        # What passed is committed and does not change; reading it again on every look would
        # take the bandwidth that the save needs.
        url = checkpoint.source.url
        if url in passed:
            return ExitCode.OK, ""
        answer = check(checkpoint, root)
        if answer[0] is ExitCode.OK:
            passed.add(url)
        return answer

    while True:
        root = read()
        said: list[str] = []
        found = select(root, check_once, rules, said.append)
        # The first look may take long, on a large root; the wait begins after it.
        end = clock() + timeout if end is None else end
        if not found.pending or clock() >= end:
            for line in said:
                note(line)
            if found.pending:
                names = ", ".join(root.url_of(c) for c in found.pending)
                note(f"waited {timeout:g} s in vain for {names}")
            return found
        (say or note)("waiting for " + ", ".join(root.url_of(c) for c in found.pending))
        delay = _FIRST
        while clock() < end:
            sleep(max(0.0, min(delay, end - clock())))
            delay = min(delay * _GROWTH, _LONGEST)
            if not all(_in_flight(root, c, check) for c in found.pending):
                break


def _in_flight(root: Root, candidate: Candidate, check: Check) -> bool:
    """Look again at one candidate: whether it is still there and still not committed."""
    try:
        if candidate.staging:
            root.store.stat(candidate.entry.path)
            return True
        looked = look(root, candidate)
        if looked is not None and looked.unknown:
            return True
        if looked is None or looked.error is not None or looked.child is None:
            error = None if looked is None else looked.error
            return error is not None and error.exit_code is ExitCode.INCOMPLETE
        code, _ = check(open_part(root.store, looked.child.part), root)
    except FtckptError as error:
        code = error.exit_code
    return code is ExitCode.INCOMPLETE
