"""Whether Lightning or Fabric saved a store, by its folder's name and by what is in it.

Both save a sharded checkpoint under the name that a whole one would have (`epoch=0-step=10.ckpt`,
litgpt's `lit_model.pth`), and their strategies name what they save: Lightning's Trainer `model` and
`optimizer_0`, a script with Fabric mostly `model` and `optimizer`.

Sources: lightning/pytorch/strategies/fsdp.py and model_parallel.py (`save_checkpoint`);
litgpt/pretrain.py (`save_checkpoint`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ftckpt.errors import IncompleteError
from ftckpt.findings import Finding, finding
from ftckpt.storage.source import Source

from .names import META

_OF_A_FILE = r".+\.(?:ckpt|pth|pt)"
_OWN_NAME = r"lit_model\.pth|(?:.+-)?(?:epoch|step)=\d+.*\.ckpt|last(?:-v\d+)?\.ckpt"
_OWN_OPTIMIZER = re.compile(r"optimizer_\d+\.")


def lost_meta(source: Source, stored: Iterable[str]) -> list[Finding]:
    """Return a warning if `meta.pt` is perhaps lost.

    Args:
        source: the store's folder.
        stored: the names in its metadata.

    Raises:
        IncompleteError: it is not there, and both the folder's name and the content are Lightning's
            or Fabric's.
    """
    if META in source.entries or re.fullmatch(_OF_A_FILE, source.name) is None:
        return []
    numbered, tops = False, set()
    for name in stored:
        numbered = numbered or _OWN_OPTIMIZER.match(name) is not None
        tops.add(name.partition(".")[0])
    if "model" not in tops:
        return []
    own = re.fullmatch(_OWN_NAME, source.name) is not None
    if numbered or (own and tops <= {"model", "optimizer"}):
        raise IncompleteError(
            f"{META} is not there: Lightning writes it last, and loads no store without it",
            hint="an earlier checkpoint is complete",
            kind="uncommitted",
            file=META,
        )
    if tops <= {"model", "optimizer"}:
        what = f"{META} is not there: Fabric saves it with such a store, and others do not"
        return [finding("state-unknown", what, file=META)]
    return []
