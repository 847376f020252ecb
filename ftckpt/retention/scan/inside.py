"""Another run inside an entry: gc drops whole directories, and would drop that too.

`OUT=$CKPT/sft` is a common line in scripts. What lies inside has pins, rules and a log of its own,
which the plan of this root does not read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from ftckpt.discovery.step_names import step_in_name
from ftckpt.own_files import FOLDER

# What ftckpt keeps in a root alone, never in a checkpoint.
_OF_ROOTS = frozenset({"root.json", "pins", "tags", "leases"})
# Parts of one checkpoint have such names too: `checkpoint-5/global_step5`, and converters that know
# no step write `step_5/policy/weights/iter_0000000`.
_OF_PARTS = (0, 1)


def run_inside(paths: Iterable[str], base: str) -> str:
    """Return the path of a checkpoint or root of another run inside an entry; "" if none shows.

    Args:
        paths: of the entry's files.
        base: of the entry.
    """
    own = step_in_name(base.rpartition("/")[2])
    below: dict[str, dict[int, str]] = defaultdict(dict)
    for path in paths:
        folders = path[len(base) + 1 :].split("/")
        name = folders.pop()
        for place, folder in enumerate(folders):
            if folder == FOLDER:
                if (*folders[place + 1 :], name)[0] in _OF_ROOTS:
                    return "/".join([base, *folders[:place]])
                break
            step = None if folder.isdecimal() else step_in_name(folder)
            if step is not None:
                above = "/".join(folders[:place])
                below[above].setdefault(step, "/".join([base, *folders[: place + 1]]))
    for steps in below.values():
        others = [path for step, path in sorted(steps.items()) if step != own]
        alone = len(steps) == 1 and (own is None or next(iter(steps)) in _OF_PARTS)
        if others and not alone:
            return others[0]
    return ""
