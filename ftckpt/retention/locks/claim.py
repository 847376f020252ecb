"""Claim an entry of a root for as long as a body of code works with it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from ftckpt.discovery.roots import Root
from ftckpt.errors import FtckptError
from ftckpt.retention.scan.entries import Lease

from . import leases
from .remote import LEASE

# A lease is prolonged when a third of it has passed, so that two late beats do not lose it.
_BEAT = LEASE / 4


@contextmanager
def leased(
    root: Root, entry: str, holder: str, now: Callable[[], float] = time.time
) -> Iterator[None]:
    """Claim an entry, so that gc leaves it alone meanwhile.

    A root that may not be written goes without: what gc takes away meanwhile is named then.
    """

    def take() -> None:
        leases.take(root, entry, holder=holder, now=now())

    try:
        take()
    except FtckptError:
        yield
        return
    try:
        with beating(take):
            yield
    finally:
        with suppress(FtckptError):
            leases.release(root, Lease(entry, holder, 0.0))


@contextmanager
def beating(beat: Callable[[], None], seconds: float = _BEAT) -> Iterator[Callable[[], None]]:
    """Call `beat` now and then while the body runs; yield what raises the failure of one.

    Args:
        beat: may raise FtckptError, and is not called again then.
        seconds: between two calls.
    """
    failed: list[FtckptError] = []
    ended = threading.Event()

    def run() -> None:
        while not failed and not ended.wait(seconds):
            try:
                beat()
            except FtckptError as error:
                failed.append(error)

    def check() -> None:
        if failed:
            raise failed[0]
        beat()

    thread = threading.Thread(target=run, name="ftckpt-lease", daemon=True)
    thread.start()
    try:
        yield check
    finally:
        ended.set()
        thread.join()
