"""The frameworks' own tools for another layout or format, as contestants.

Each is Python code in two parts, what it imports and what it does: it is timed as a whole command,
and also from where its imports are done, because most of a short run is importing torch.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import side_by_side


@dataclass(frozen=True)
class Peer:
    """Another tool.

    Attributes:
        name: of its rows.
        framework: whose interpreter runs it; "" for the one that runs the benchmark.
        imports, work: its code; `source` and `out` are the two paths.
    """

    name: str
    framework: str
    imports: str
    work: str

    def command(self, pythons: Mapping[str, str], source: str, out: str) -> list[str]:
        """Return the command that does all of it."""
        return self._command(pythons, source, out, f"{self.imports}\n{self.work}")

    def waiting(self, pythons: Mapping[str, str], source: str, out: str) -> Waiting:
        """Return it as a process that imports, waits for a line, and works."""
        code = f"{self.imports}\nprint({_READY!r}, flush=True)\ninput()\n{self.work}"
        return Waiting(self._command(pythons, source, out, f"{code}\n{_LEAVE}"))

    def _command(self, pythons: Mapping[str, str], source: str, out: str, code: str) -> list[str]:
        python = pythons[self.framework] if self.framework else sys.executable
        return [python, "-c", f"import sys\nsource, out = sys.argv[1:]\n{code}", source, out]


_READY = "its imports are done"
_LEAVE = "import os\nos._exit(0)"  # taking an interpreter with torch down is not the work


class Waiting:
    """A process whose imports are not timed: `start` it before, then `work`."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start it, and return when it has imported what it needs."""
        process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            stderr=subprocess.DEVNULL, env=side_by_side.environment(),
        )  # fmt: skip
        assert process.stdout is not None
        if not any(line.strip() == _READY for line in process.stdout):  # frameworks print, too
            raise SystemExit(f"{self._command[0]} ended with {process.wait()} while importing")
        self._process = process

    def work(self) -> None:
        """Let it work, and return when it has ended."""
        assert self._process is not None
        self._process.communicate("\n")
        if self._process.returncode:
            raise SystemExit(f"{self._command[0]} ended with {self._process.returncode}")


_DEEPSPEED = "import os\nos.environ['DS_ACCELERATOR'] = 'cpu'\n"

DCP_TO_TORCH_SAVE = Peer(
    "dcp_to_torch_save",
    "",
    "from torch.distributed.checkpoint.format_utils import dcp_to_torch_save",
    "dcp_to_torch_save(source, out)",
)
HUGGING_FACE_READER = Peer(
    "HuggingFaceStorageReader, then save",
    "",
    "import torch\n"
    "from torch.distributed.checkpoint.filesystem import FileSystemWriter\n"
    "from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader\n"
    "from torch.distributed.checkpoint.state_dict_loader import load\n"
    "from torch.distributed.checkpoint.state_dict_saver import save",
    "reader = HuggingFaceStorageReader(source, thread_count=2)\n"
    "held = reader.read_metadata().state_dict_metadata\n"
    "state = {n: torch.empty(m.size, dtype=m.properties.dtype) for n, m in held.items()}\n"
    "load(state, storage_reader=reader, no_dist=True)\n"
    "save(state, storage_writer=FileSystemWriter(out, thread_count=2), no_dist=True)",
)
PRETRAINED = Peer(
    "transformers, load and save",
    "transformers",
    "from transformers import LlamaForCausalLM",  # the class that AutoModel would import
    "model = LlamaForCausalLM.from_pretrained(source, dtype='auto')\n"
    "model.save_pretrained(out, max_shard_size='500MB')",
)
ZERO_TO_FP32 = Peer(
    "zero_to_fp32.py, no moments",
    "deepspeed",
    _DEEPSPEED + "from pathlib import Path\n"
    "from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict",
    "tag = Path(source)\n"
    "convert_zero_checkpoint_to_fp32_state_dict(str(tag.parent), out, tag=tag.name)",
)
DS_TO_UNIVERSAL = Peer(
    "ds_to_universal.py, 2 workers",
    "deepspeed",
    _DEEPSPEED + "from deepspeed.checkpoint import ds_to_universal",
    "sys.argv[1:] = ['--input_folder', source, '--output_folder', out,\n"
    "                '--num_extract_workers', '2', '--num_merge_workers', '2']\n"
    "ds_to_universal.main(ds_to_universal.parse_arguments())",
)
