"""Which files may hold a checkpoint's state, by names and first bytes: for what no format has read.

A name is enough to ask for a file's content, and never enough to say what is in it.

Files that Git LFS has not fetched: a clone without it leaves a small text in each one's place.

    version https://git-lfs.github.com/spec/v1
    oid sha256:<64 hexadecimal digits>
    size <bytes>

Source: `docs/spec.md` of git-lfs, which keeps pointers under 1024 bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ftckpt.errors import IncompleteError

# Suffixes under which trainers save tensors; a packed one counts as what was packed.
_TENSORS = re.compile(
    r".*\.(?:pt|pth|bin|ckpt|safetensors|distcp|pkl|pickle|tar|h5|hdf5|msgpack|npz|pd(?:params|opt))"
    r"(?:\.(?:zst|lz4|gz))?",
    re.DOTALL | re.IGNORECASE,
)
# A model's weights as other programs load them, beside the weights that are checked.
_EXPORTED = re.compile(
    r"(?:.*/)?(?:(?:tf|flax|rust|openvino)_model(?:[-.].*)?"
    r"|(?:onnx|openvino|coreml|gguf|hf|huggingface)(?:[-_][^/]*)?/.*|original/consolidated[^/]*)",
    re.DOTALL,
)
# The Hugging Face Trainer's settings, which it pickles beside every model.
_ARGUMENTS = "training_args.bin"
# Text, pictures and logs; and what editors, version control and Python leave.
_HARMLESS = re.compile(
    r"\..*|.*~|(?:README|LICENSE|NOTICE|Makefile|Dockerfile)(?:\..*)?|.*tfevents.*|PaxHeader"
    r"|.*\.(?:txt|md|rst|log|jsonl?|ya?ml|toml|ini|cfg|conf|csv|tsv|out|err|html?|css|xml)(?:\.gz)?"
    r"|.*\.(?:pdf|png|jpe?g|gif|svg|mp4|wav|py|pyc|sh|slurm|sbatch|ipynb|lock|pid|prom|jinja"
    r"|wandb|arrow|parquet)",
    re.DOTALL | re.IGNORECASE,
)
# What trainers write last, whatever they call it: `.metadata.json`, `.rank_0_complete`, `_SUCCESS`.
_MARKER = re.compile(
    r"[._].*(?:metadata|complete|done|success|commit|finish)[^/]*|(?:done|complete|committed)",
    re.IGNORECASE,
)
# A trainer's small files: each save has them, and each has its own of those that tell a state.
_SMALL = re.compile(
    r"(?!README|LICENSE|NOTICE)(?!.*index[^/]*\.json)[^.][^/]*\.(?:json|ya?ml|toml|txt|model|spm|jinja)",
    re.IGNORECASE,
)
_OF_STATE = frozenset(
    {
        "meta", "state", "states", "progress", "counter", "counters", "step", "steps", "trainer",
        "training", "train", "loop", "rng", "random", "scheduler", "schedule", "dataloader",
        "loader", "sampler", "optimizer", "optim", "scaler", "sched", "callbacks", "extra",
    }
)  # fmt: skip
_OF_SETTINGS = frozenset(
    {"args", "arguments", "config", "configs", "settings", "hparams", "parameters", "params"}
)
# What describes a model and its texts.
_OF_MODELS = frozenset(
    {
        "tokenizer", "tokenizers", "vocab", "vocabulary", "tokens", "merges", "generation",
        "preprocessor", "processor", "template", "index", "modules", "model", "adapter", "card",
        "dict", "dictionary", "labels", "version", "manifest", "metadata",
    }
)  # fmt: skip
_TEXT_OF_STATE = re.compile(r"[^.].*\.(?:json|ya?ml|toml|txt|msgpack|csv)", re.IGNORECASE)
# What a job writes about itself, as often as it likes.
_OF_RESULTS = frozenset(
    {
        "log", "logs", "result", "results", "metric", "metrics", "eval", "evaluation", "loss",
        "losses", "history", "sample", "samples", "report", "plot", "plots", "wandb", "runs",
        "tensorboard", "cache", "tmp", "prompts", "images", "test", "val", "valid", "validation",
        "requirements", "environment", "notes",
    }
)  # fmt: skip
_OF_NOTES = frozenset({"readme", "license", "licence", "notice", "use", "policy"})
_NUMBER = re.compile(r"\d+")
# Bytes that no text has; a coloured log has ESC.
_BINARY = bytes({*range(0x20), 0x7F} - {*b"\t\n\r\f\x1b"})


def may_hold_tensors(path: str) -> bool:
    """Say whether a file may hold tensors that a trainer saved, by its path."""
    return _TENSORS.fullmatch(path) is not None and not path.endswith(_ARGUMENTS)


def is_exported(path: str) -> bool:
    """Say whether a file is a model's weights a second time, for another program, by its path."""
    return _EXPORTED.fullmatch(path) is not None


def is_harmless(name: str) -> bool:
    """Say whether a file is surely no checkpoint's state, by its name."""
    return _HARMLESS.fullmatch(name) is not None


def is_marker(name: str) -> bool:
    """Say whether a file's name is that of a commit marker; `.incomplete` says the contrary."""
    return _MARKER.fullmatch(name) is not None and "incomplete" not in name.lower()


def parts_among(names: Iterable[str], prefix: str = "") -> frozenset[str]:
    """Return the names of state and markers of a folder as every step has them: numbers as `#`."""
    held = (name for name in names if may_hold_tensors(name) or is_marker(name))
    return frozenset(without_numbers(prefix + name) for name in held)


def tells_state(path: str) -> bool | None:
    """Say whether a file of a save tells state that a resume needs, by its path below the save.

    Returns:
        False for what describes the model or the job (`config.json`, a tokenizer) and for other
        tensors (an export), which other saves have as well or can be made again; None for results
        and notes, for a shard, of which others hold the rest, and for any other file.
    """
    folders, _, name = path.rpartition("/")
    tensors = may_hold_tensors(name)
    if not (tensors or _SMALL.fullmatch(name)) or is_exported(path):
        return None
    if any(part.startswith((".", "__")) for part in path.split("/")):
        return None
    words = _words_of(name)
    if (words | _words_of(folders)) & _OF_RESULTS:
        return None
    state = words & _OF_STATE or (tensors and _words_of(folders) & _OF_STATE)
    if state and not words & _OF_SETTINGS:
        return True
    return None if tensors and "#" in without_numbers(name) else False


def _words_of(path: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z]+", (path.rpartition(".")[0] or path).lower()))


def is_text_of_state(path: str) -> bool:
    """Say whether a small file may hold state that a resume needs, by its path.

    So may any that no word in its name calls a description of the model or the job, or results.
    """
    name = path.rpartition("/")[2]
    if _TEXT_OF_STATE.fullmatch(name) is None:
        return False
    words = _words_of(name)
    about = words & (_OF_RESULTS | _OF_SETTINGS | _OF_MODELS | _OF_NOTES)
    return bool(words & _OF_STATE) or not about


def is_text(head: bytes) -> bool:
    """Say whether a file that begins so is a text, in any encoding that extends ASCII."""
    return head != b"" and head.translate(None, _BINARY) == head


def numbers_in(name: str) -> tuple[int, ...]:
    """Return the numbers in a name, in their order; of more than 18 digits, in pieces of 18."""
    return tuple(map(int, re.findall(r"\d{1,18}", name)))


def without_numbers(name: str) -> str:
    """Return a name with `#` for each number: the same for all ranks, shards and steps."""
    return _NUMBER.sub("#", name)


_LONGEST = 1024  # bytes of a pointer
FETCH = "`git lfs pull` in the clone fetches it"
_SIZE = rb"^size ([0-9]{1,18})$"
_DIGEST = rb"^oid sha256:([0-9a-f]{64})$"


def never_fetched(name: str, data: bytes) -> IncompleteError:
    """Return the error about a file whose content was never fetched.

    Args:
        name: of the file.
        data: the pointer.
    """
    said = []
    if size := re.search(_SIZE, data[:_LONGEST], re.MULTILINE):
        said.append(f"{int(size[1])} bytes")
    if digest := re.search(_DIGEST, data[:_LONGEST], re.MULTILINE):
        said.append(f"SHA-256 {digest[1].decode()}")
    return IncompleteError(
        f"{name} is a Git LFS pointer: the content was never fetched"
        + (f" ({', '.join(said)})" if said else ""),
        hint=FETCH,
        kind="unfetched-file",
        file=name,
    )
