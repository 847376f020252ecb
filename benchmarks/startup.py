"""How long the command line takes to answer without work.

python benchmarks/startup.py [--rounds 20] [--json]
"""

from __future__ import annotations

import side_by_side
from side_by_side import Contestant, Row, compare, run_ftckpt

VERBS = ("inspect", "verify", "seal", "latest", "demo")


def main() -> None:
    parser = side_by_side.arguments(__doc__.splitlines()[0], rounds=20)
    options = parser.parse_args()
    commands = [("--help",), ("--version",), *((verb, "--help") for verb in VERBS)]

    def answer(words: tuple[str, ...]) -> int:
        run_ftckpt(*words)
        return 0

    contestants = [
        Contestant(" ".join(words), lambda w=words: answer(w), ours=words == ("--help",))  # type: ignore[misc]
        for words in commands
    ]
    rows: list[Row] = compare(contestants, options.rounds)
    side_by_side.show("start-up", rows, {}, as_json=options.json)


if __name__ == "__main__":
    main()
