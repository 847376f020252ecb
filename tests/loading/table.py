"""The table of formats and numbers of ranks in docs/loading.md.

.venv/bin/python -m tests.loading.table      loads every sample anew, and writes the table
"""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

from tests.builders.jobs import run_job

from .samples import DATA, FLAGS, WAYS, samples

PAGE = Path(__file__).parents[2] / "docs" / "loading.md"
BEGIN, END = "<!-- ranks -->", "<!-- end of ranks -->"
COLUMNS = (1, 2, 3, 4)
_ROW = re.compile(r"\| `([^`]+)` \| `([^`]+)` \| (.*) \|")


def read() -> dict[str, dict[int, int]]:
    """Return for each sample the number of tensors that the page says for each number of ranks."""
    text = PAGE.read_text()
    inside = text[text.index(BEGIN) : text.index(END)]
    found = {}
    for match in map(_ROW.fullmatch, inside.splitlines()):
        if match is not None:
            counts = [int(one) for one in match[3].split(" | ")]
            found[match[2]] = dict(zip(COLUMNS, counts, strict=True))
    return found


def made() -> str:
    """Load every sample at every number of ranks; return the table."""
    asked = [
        {"place": str(DATA / one), "ways": WAYS, "flags": FLAGS.get(one, {})}
        for _, one in samples()
    ]
    counts: dict[str, list[str]] = {one: [] for _, one in samples()}
    with tempfile.TemporaryDirectory() as place:
        asking, answer = Path(place, "asked.json"), Path(place, "answer.json")
        asking.write_text(json.dumps(asked))
        for ranks in COLUMNS:
            run_job(ranks, Path(__file__).with_name("conformance_job.py"), asking, answer)
            found = json.loads(answer.read_text())["found"]
            for one, row in counts.items():
                said = set(found[str(DATA / one)].values())
                assert len(said) == 1, (one, found[str(DATA / one)])
                row.append(said.pop())
    lines = [
        "| format | sample | 1 rank | 2 ranks | 3 ranks | 4 ranks |",
        "|---|---|---|---|---|---|",
    ]
    lines += [f"| `{form}` | `{one}` | {' | '.join(counts[one])} |" for form, one in samples()]
    return "\n".join(lines)


def main() -> None:
    text = PAGE.read_text()
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    PAGE.write_text(f"{text[:begin]}\n{made()}\n{text[end:]}")


if __name__ == "__main__":
    main()
