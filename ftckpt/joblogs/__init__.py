"""What the logs of a run say about its failures.

    from ftckpt.joblogs import read_logs, report_of

    read = read_logs(["slurm-42.out", "sacct.txt", "/ckpt/run7/.ftckpt/guard.jsonl"])
    report = report_of(read.collections, together=900.0)
    report.total.mtbf_s, report.classes

`reading` turns each kind of file into entries (`entries`), `collect` keeps what is needed of them,
`grouping` makes incidents of lines, and `report` counts.
"""

from __future__ import annotations

from .report import IncidentReport as IncidentReport
from .report import report_of as report_of
from .sources import TOGETHER as TOGETHER
from .sources import read_logs as read_logs
