"""Fill a job's own memory from a checkpoint, each byte read once and checked on the way.

What is wanted is a list of shards (`ftckpt.transfer.content.Shard`), each with a place in memory to
go to (`targets`). `fill` finds where their bytes lie, reads those in the order of the files, a few
megabytes at a time, and puts them in place; `evidence` holds what was read to the CRC-32s or the
manifest of the checkpoint; `shares` says, for a job of several ranks, which of them checks what
several read in part. Nothing here knows a format, or torch.
"""
