"""The bound of one step leaves the other threads what they need."""

from __future__ import annotations

import mmap
import os
import resource
import threading

import pytest

from ftckpt.workers.memory import MARGIN, bounded


def test_a_thread_alone_may_not_grow_further() -> None:
    if threading.active_count() > 1:
        pytest.skip("an earlier test left a thread")
    with bounded(0), pytest.raises((OSError, MemoryError)):
        mmap.mmap(-1, MARGIN + (64 << 20))
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY


def test_other_threads_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """On many processors many threads start and take buffers while one reads a pickle.

    The bound was the same however many there were: threads did not start, and CUDA was out of
    memory with 139 GiB free.
    """
    monkeypatch.setattr(os, "cpu_count", lambda: 32)
    inside, over = threading.Event(), threading.Event()

    def read() -> None:
        with bounded(0):
            inside.set()
            over.wait()

    reader = threading.Thread(target=read)
    reader.start()
    inside.wait()
    try:
        held = [mmap.mmap(-1, 100 << 20) for _ in range(32)]
        threads = [threading.Thread(target=over.wait) for _ in range(32)]
        for thread in threads:
            thread.start()
    finally:
        over.set()
        reader.join()
    for thread in threads:
        thread.join()
    for one in held:
        one.close()
