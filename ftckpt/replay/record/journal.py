"""Write the log, the markers and the requested tensor values of one process."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ftckpt.replay.processes import Settings, done_marker, saves_file, stopped_marker, values_file

from .log import SCHEMA, StepRecord, line
from .tensors import plain, raw_bytes

if TYPE_CHECKING:
    import torch

# Bytes kept of one tensor.
_KEPT = 64 << 20


class Journal:
    """Writes the log of one process; creates nothing on disk before the first record.

    Attributes:
        numbered: where the numbers of its steps come from; see `Log.numbered`.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._folder = Path(settings.log)
        self._rank: int | None = None
        self._file: IO[str] | None = None
        given = settings.at or settings.last or settings.stop_at or settings.stop_after_save
        self.numbered = "given" if given else "counted"

    @property
    def begun(self) -> bool:
        """Whether a record was written."""
        return self._file is not None

    @property
    def rank(self) -> int:
        """The rank of this process in its job, as known at the first use."""
        if self._rank is None:
            distributed = sys.modules.get("torch.distributed")
            ready = distributed is not None and distributed.is_available()
            if distributed is not None and ready and distributed.is_initialized():
                self._rank = int(distributed.get_rank())
            else:
                self._rank = int(os.environ.get("RANK", "0") or 0)
        return self._rank

    def write(self, record: StepRecord) -> None:
        """Append a record.

        Raises:
            FileExistsError: the directory holds the log of another run.
        """
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = (self._folder / f"rank-{self.rank}.jsonl").open("x", encoding="utf-8")
            header = {**_header(self.rank), "numbered": self.numbered}
            self._file.write(json.dumps(header) + "\n")
        self._file.write(line(record) + "\n")
        self._file.flush()

    def keep(self, step: int, event: str, item: str, tensor: torch.Tensor) -> None:
        """Keep the values of a tensor, if requested.

        The file begins with a line of JSON, type and shape; then the elements in C order, up to the
        limit. An unreadable tensor is not kept.
        """
        if (step, event) != (self._settings.look_step, self._settings.look_event):
            return
        names = self._settings.look_items.split("\n")
        dense = plain(tensor) if item in names else None
        if dense is None:
            return
        head = {"dtype": str(dense.dtype).removeprefix("torch."), "shape": list(dense.shape)}
        file = values_file(self._folder, self.rank, names.index(item))
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as out:  # over an earlier one: batches of a step replace each other
            out.write(json.dumps(head).encode() + b"\n")
            out.write(raw_bytes(dense.reshape(-1)[: _KEPT // dense.element_size()].cpu()))

    def done(self) -> None:
        """Mark that everything requested is recorded."""
        done_marker(self._folder, self.rank).touch()

    def saved(self, step: int, passes: int) -> None:
        """Note a save: the number of steps before it, and backward passes of the next."""
        with saves_file(self._folder, self.rank).open("a", encoding="utf-8") as out:
            out.write(f"{step} {passes}\n")

    def stopped(self, step: int) -> None:
        """Mark that the process is where it should be ended."""
        stopped_marker(self._folder).write_text(str(step))


def _header(rank: int) -> dict[str, Any]:
    import torch

    world = int(os.environ.get("WORLD_SIZE", "1") or 1)
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        world = distributed.get_world_size()
    return {
        "log": SCHEMA,
        "rank": rank,
        "world_size": world,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "tf32": torch.get_float32_matmul_precision() != "highest",
    }
