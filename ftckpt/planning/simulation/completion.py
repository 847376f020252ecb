"""A job of a given size: the distribution of its time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ftckpt.errors import UsageError
from ftckpt.progress import Counter

from .jobs import Jobs
from .laws import Law
from .ledger import TimeLedger
from .steady import ROWS
from .timeline import Timeline

if TYPE_CHECKING:
    import numpy as np

MOST_FAILURES = 1 << 16


def run(
    jobs: Jobs,
    timeline: Timeline,
    law: Law,
    work: float,
    rng: np.random.Generator,
    counter: Counter,
) -> TimeLedger:
    """Run until every run has done so much work; return where the time went.

    `jobs` must keep places. Finished runs continue until the last one is done, and are ignored.

    Raises:
        UsageError: a run is not done after `MOST_FAILURES`.
    """
    import numpy as np

    clock, runs = jobs.clock, len(jobs.place)
    bulks = math.ceil(work / timeline.work * (1 - 1e-12))
    rest = work - (bulks - 1) * timeline.work  # after the last needed save
    alone, behind = timeline.first.time_of(rest), timeline.cycle[0].time_of(rest)
    jobs.need = np.zeros(runs)  # there is nothing to restart from yet
    final, waits = TimeLedger(runs), np.ones(runs, dtype=bool)
    draw = law.sampler(rng, runs)
    for _ in range(0, MOST_FAILURES, ROWS):
        gaps, causes = draw(ROWS), jobs.causes(rng, ROWS)
        for row in range(ROWS):
            saves = bulks - 1 - jobs.place
            tail = np.where(saves > 0, behind, alone)
            needed = jobs.need + clock.seconds(jobs.place, saves) + tail
            done = waits & (gaps[row] >= needed)
            if done.any():
                counter.add(int(np.count_nonzero(done)))
                waits &= ~done
                final.copy(jobs.ledger, done)
                final.wall[done] += needed[done]
                final.restart[done] += jobs.need[done]
                final.useful[done] += saves[done] * timeline.work + rest
                final.save[done] += (clock.stalled(jobs.place, saves) + tail - rest)[done]
                final.waiting[done] += clock.waited(jobs.place, saves)[done]
                if not waits.any():
                    final.segments = jobs.ledger.segments
                    final.check()
                    return final
            jobs.fail(gaps[row], None if causes is None else causes[row])
    raise UsageError(
        f"the job is not done after {MOST_FAILURES:,} failures: it hardly comes forward",
        hint="simulate a long run without an end, or save at another interval",
    )
