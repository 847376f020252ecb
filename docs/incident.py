"""Draw the incident of the README from a real run: `python docs/incident.py`.

A tiny model is trained and saved, one bit of the newest checkpoint flips, torch loads it without a
word, and ftckpt finds it and steps back. The commands are run, and their own output is drawn: one
picture for a wide screen, one for a narrow one, each in light and dark.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
import warnings
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from ftckpt.commands.demo import middle_of_a_tensor  # noqa: E402
from ftckpt.commands.pictures.webpage import COLOURS, safe  # noqa: E402
from ftckpt.demonstration import flip_bit, train_and_save  # noqa: E402

COMMANDS = (
    "ftckpt verify run7/step-30",
    "CKPT=$(ftckpt latest run7 --level content) || exit $?",
    'echo "$CKPT"',
)
SAID = (
    "Terminal: one bit of the newest checkpoint has flipped, and torch loads it without an error."
    " ftckpt verify names the damaged tensor and exits with 4. ftckpt latest skips the damaged"
    " checkpoint and prints the one before it."
)
# Columns of text; letters are 16 pixels high where the picture is not made smaller.
PICTURES = {"incident.svg": 80, "incident-narrow.svg": 40}
_MARK = "\x1e"
_CHARACTER, _LINE, _EDGE = 9.64, 22, 20
_FONT = "ui-monospace, 'SF Mono', 'Cascadia Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace"


class Line(NamedTuple):
    """One line of the terminal, and what it is: a class of the style sheet."""

    kind: str
    text: str


def recorded(place: Path) -> list[Line]:
    """Run the incident in an empty directory; return what a terminal shows."""
    root = place / "run7"
    newest = train_and_save(str(root))[-1]
    flip_bit(*middle_of_a_tensor(newest))
    load(newest)
    lines = [
        Line("remark", "# one bit of the newest checkpoint flipped; torch loads it in silence")
    ]
    # One shell runs all, as a person's does; a mark ends the output of each command.
    script = "\n".join(f"{command}; printf '{_MARK}'" for command in COMMANDS)
    done = subprocess.run(
        ["bash", "-c", script.replace("ftckpt ", f"{sys.executable} -m ftckpt ")],
        cwd=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120,
        check=False, env=os.environ | {"PYTHONPATH": str(HERE.parent), "NO_COLOR": "1"},
    )  # fmt: skip
    for command, output in zip(COMMANDS, done.stdout.split(_MARK)[:-1], strict=True):
        lines.append(Line("typed", f"$ {command}"))
        # The answer alone: without notes, hints, and the progress that a slow machine is told of.
        lines += [Line(kind, text) for text in output.splitlines() if (kind := kind_of(text))]
    return lines


def load(path: str) -> None:
    """Load a checkpoint as a trainer does; it raises where torch sees the damage."""
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load as load_state

    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(tuple(held.size), dtype=held.properties.dtype)
        for name, held in metadata.items()
        if isinstance(held, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch remarks that there is one process
        load_state(state, checkpoint_id=path, no_dist=True)


def kind_of(text: str) -> str:
    """Return the class of a line of output; "" for one that a first look does without."""
    kinds = {"error: ": "bad", "ftckpt: ": "bad", "skipped ": "warn", "run7/": "good"}
    return next((kind for start, kind in kinds.items() if text.startswith(start)), "")


def drawn(lines: list[Line], columns: int) -> str:
    """Return a terminal of so many columns as SVG."""
    shown = [
        Line(line.kind, part)
        for line in lines
        for part in textwrap.wrap(
            line.text, columns, subsequent_indent="  ", break_on_hyphens=False
        )
    ]
    width = round(columns * _CHARACTER + 2 * _EDGE)
    height = len(shown) * _LINE + 2 * _EDGE
    text = "\n".join(
        f'<text x="{_EDGE}" y="{_EDGE + (row + 0.75) * _LINE:.1f}" class="{line.kind}">'
        f"{safe(line.text)}</text>"
        for row, line in enumerate(shown)
    )
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"
 viewBox="0 0 {width} {height}" role="img" aria-labelledby="title said">
<title id="title">A damaged checkpoint, and the newest good one</title><desc id="said">{SAID}</desc>
<style>{COLOURS}
rect {{ fill: var(--none); stroke: var(--line); }}
text {{ font: 16px {_FONT};
  fill: var(--ink); white-space: pre; }}
.typed {{ font-weight: 700; }} .remark {{ fill: var(--faint); }} .bad {{ fill: var(--on-bad); }}
.warn {{ fill: var(--on-warn); }} .good {{ fill: var(--on-good); font-weight: 700; }}
</style>
<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>
{text}
</svg>
"""


def main() -> None:
    """Write both pictures beside this file."""
    with tempfile.TemporaryDirectory() as place:
        lines = recorded(Path(place))
    for name, columns in PICTURES.items():
        (HERE / name).write_text(drawn(lines, columns))


if __name__ == "__main__":
    main()
