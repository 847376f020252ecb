"""Values that are no tensors, as bytes that a job may hand to `torch.load`.

torch executes the pickle that it is handed. So nothing of a file is handed over: a value is read
as inert data and written anew, and what is written may name the classes of `ALLOWED` alone, and
those that the job itself has allowed.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from ftckpt.errors import UnsafeError, UnsupportedError
from ftckpt.formats.torch_files.write_tree import save
from ftckpt.transfer.layout import Checksums, Elements, Literal, Segment, Stored, Zeros

if TYPE_CHECKING:
    from ftckpt.transfer.read.elements import Gatherer

# What holds numbers, texts, times, paths, arrays and tensors, and does nothing when it is made.
ALLOWED = re.compile(
    r"(?:__builtin__|builtins)\.(?:bool|bytearray|bytes|complex|dict|float|frozenset|int|list|long"
    r"|object|range|set|slice|str|tuple|unicode|xrange)"
    r"|collections\.(?:Counter|OrderedDict|defaultdict|deque)"
    r"|datetime\.(?:date|datetime|timedelta|timezone)|decimal\.Decimal|fractions\.Fraction"
    r"|uuid\.UUID|argparse\.Namespace|types\.SimpleNamespace|_?io\.BytesIO|_?codecs\.encode"
    r"|(?:copy_reg|copyreg)\._reconstructor"
    r"|pathlib\.(?:_local\.)?(?:Pure)?(?:Posix|Windows)?Path"
    r"|numpy\.(?:ndarray|dtype|dtypes\.\w+DType|_?core\.(?:multiarray\.(?:_reconstruct|scalar)"
    r"|numeric\._frombuffer))"
    r"|torch\.(?:\w*Storage|Size|device|storage\.\w*Storage|torch_version\.TorchVersion"
    r"|serialization\._get_layout|_utils\._rebuild_(?:tensor(?:_v2|_v3)?|parameter)"
    r"|(?:q?u?int|float|bfloat|complex|bool|half|double|long)\w*)"
)


def saved(value: Any, gatherer: Gatherer, *, name: str, allow: Collection[str] = ()) -> bytes:
    """Return what `torch.save` would write of a value.

    Args:
        value: inert data, or a `CopiedTree` of it.
        gatherer: reads the tensors inside.
        name: of the value, for messages.
        allow: classes that the job has allowed, by qualified name.

    Raises:
        UnsafeError: it names a class that is not allowed.
        UnsupportedError: it cannot be written anew.
    """
    try:
        data = _bytes(save(value), gatherer)
    except UnsupportedError as error:
        error.message = f"{name}: {error.message}"
        error.tensor = error.tensor or name
        raise
    foreign = sorted({one for one in classes_in(data) if not ALLOWED.fullmatch(one)} - {*allow})
    if foreign:
        raise UnsafeError(
            f"{name} holds a {foreign[0]}, and torch.load would call it",
            kind="unsafe-pickle",
            hint=f"Reader(..., allow=[{foreign[0]!r}]) if you trust it; or leave {name} out of the"
            " state that is loaded",
            tensor=name,
        )
    return data


def classes_in(data: bytes) -> Iterator[str]:
    """Yield the names that the pickle of a `torch.save` archive refers to.

    Raises:
        UnsafeError: it refers to one in a way that is not known.
    """
    import pickletools

    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        pickle = next(one for one in archive.namelist() if one.endswith("/data.pkl"))
        text = archive.read(pickle)
    for opcode, argument, _ in pickletools.genops(text):
        if opcode.name == "GLOBAL":
            yield str(argument).replace(" ", ".", 1)
        elif opcode.name in ("STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4"):
            # Which name that is depends on what lies on the stack.
            raise UnsafeError(
                "a value names a class inside another one, which is not handed to torch",
                kind="unsafe-pickle",
            )


def _bytes(segments: Collection[Segment], gatherer: Gatherer) -> bytes:
    """Return the bytes of a file that is laid out; small enough to be held."""
    import zlib

    made = bytearray()
    for segment in segments:
        if isinstance(segment, Literal):
            made += segment.data
        elif isinstance(segment, Zeros):
            made += bytes(segment.nbytes)
        elif isinstance(segment, Checksums):
            made += segment.build([zlib.crc32(made[a:b]) for a, b in segment.ranges])
        else:
            part = bytearray(segment.nbytes)
            if isinstance(segment, Elements):
                gatherer.fill(segment.shard, segment.start, segment.stop, memoryview(part))
            elif isinstance(segment, Stored):
                gatherer.copy(segment.extent, memoryview(part))
            made += part
    return bytes(made)
