"""Move the state of one checkpoint into another layout: planned, streamed, journaled, proven.

    Content     what is to be written: logical tensors, each made of boxes of the source's tensors
    Writer      one format's way to lay content out in files (`formats/`)
    Layout      the files, byte by byte, before any byte is read: literals, elements, checksums
    the engine  fills blocks of those files from the source, in bounded memory

No part of the engine knows a format, and no writer reads a tensor's bytes or writes a file.
"""

from __future__ import annotations
