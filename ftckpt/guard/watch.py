"""Find the saves of a running command, verify each in the background, and keep the last good one.

A thread lists the root now and then, another one verifies. A save counts when its headers say that
it is committed; it is then verified by a process of the lowest priority, so that the training loses
nothing by it. Some formats have no commit marker: a save that does not pass may still be in flight,
and is verified once more before it is called damaged.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from ftckpt.discovery.candidates import look
from ftckpt.discovery.roots import Root
from ftckpt.discovery.step_names import is_put_aside
from ftckpt.errors import ExitCode, FtckptError
from ftckpt.own_files import WEIGHTS

from .folders import FilesOf, Folders, files_of

# Seconds until a save that does not pass is verified again.
SETTLED = 30.0
# How often a verification may end without an answer.
_SILENT = 3
# Seconds that may pass before a start while the files of older saves are noted.
NOTING = 20.0
# What a listing shows of each name: it changes when a save of the same name is made again.
Shown = Mapping[str, tuple[float | None, int]]


class NewSave(NamedTuple):
    """A save that was committed while the command ran.

    Attributes:
        name: in its root.
        path: as a user would type it.
        step: by content, else by name.
        number: counts the saves that a watcher has seen.
        again: whether it is more of the save of this name that was told of last.
    """

    name: str
    path: str
    step: int | None
    number: int = 0
    again: bool = False


class CheckedSave(NamedTuple):
    """The verdict on a save.

    Attributes:
        save: which.
        code: of `ftckpt verify`.
        message: its sentence.
        seconds: that it took.
        newest: whether it passes, and none that passes was made after it.
    """

    save: NewSave
    code: ExitCode
    message: str
    seconds: float
    newest: bool = False


def shown(root: Root) -> Shown:
    """Return what the listing of a root shows of its candidates."""
    return {c.path: (c.entry.mtime, c.entry.size) for c in root.candidates}


class UnreadSave(NamedTuple):
    """A save that was not there before, and whose headers cannot be read."""

    save: NewSave
    error: FtckptError


def new_saves(root: Root, before: Shown, unread: list[UnreadSave] | None = None) -> list[NewSave]:
    """Return the committed saves that a root did not show before, by ascending step.

    One that cannot be read is left for the next look, and added to `unread`.
    """
    found = []
    for candidate in root.candidates:
        now = candidate.entry.mtime, candidate.entry.size
        if candidate.staging or before.get(candidate.path) == now:
            continue
        if is_put_aside(candidate.path):  # renamed by somebody, and no save
            continue
        try:
            looked = look(root, candidate)
        except FtckptError:
            continue
        if looked is None or looked.unknown:
            continue
        if looked.child is None or looked.error is not None:
            if looked.child is not None and looked.error is not None and unread is not None:
                save = NewSave(candidate.path, root.url_of(candidate), looked.known_step)
                unread.append(UnreadSave(save, looked.error))
            continue
        found.append(NewSave(candidate.path, root.url_of(candidate), looked.known_step))
    return sorted(found, key=lambda save: (save.step is not None, save.step or 0))


@dataclass
class Verifier:
    """Runs `ftckpt verify` at low priority.

    Attributes:
        flags: more flags of it: the limit of the rate, the settings of object stores.
        level: how deep.
    """

    flags: Sequence[str] = ()
    level: str = "content"
    _process: subprocess.Popen[bytes] | None = None
    _stopped: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def verify(self, path: str) -> tuple[ExitCode, str] | None:
        """Return the verdict on a checkpoint; None if it was stopped or says nothing."""
        gently = _gently()
        # -P: a folder `ftckpt` where the job runs is not the program.
        line = [*gently, sys.executable, "-P", "-m", "ftckpt", "verify", "--json", "--jobs", "1"]
        with self._lock:
            if self._stopped:
                return None
            self._process = subprocess.Popen(
                [*line, "--level", self.level, *self.flags, "--", path],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        said, _ = self._process.communicate()
        if self._stopped:
            return None
        try:
            result = json.loads(said)["result"]
            code, message = ExitCode(result["code"]), str(result["message"])
        except (ValueError, KeyError, TypeError):
            return None
        if code is ExitCode.OK and self.level == "structure":
            # No save is known to be good, and pinned, whose content was not read.
            return ExitCode.UNVERIFIED, f"{message}; its content was not read"
        return code, message

    def stop(self) -> None:
        """End what runs, and start nothing more."""
        with self._lock:
            self._stopped = True
            if self._process is not None and self._process.poll() is None:
                self._process.kill()


@cache
def _gently() -> list[str]:
    """Return what runs a command at the lowest priority, as far as this machine allows it."""
    found: list[str] = []
    for words in (["nice", "-n", "19"], ["ionice", "-c", "3"]):
        if shutil.which(words[0]):
            # A container may forbid it, and the command would not run at all.
            tried = subprocess.run([*words, "true"], capture_output=True, check=False)
            found += words if tried.returncode == 0 else []
    return found


class SaveWatcher(threading.Thread):
    """Looks for new saves of a root until it is stopped.

    Args:
        read: lists the root anew.
        before: what it showed when the command was started.
        verify: returns the verdict on a path, or None for none.
        tell: is told of every new save and every verdict.
        every: seconds between two looks.
        settled: seconds until a save that does not pass is verified again.
        since: the step that the command started from; None for a fresh start.
    """

    def __init__(
        self,
        read: Callable[[], Root],
        before: Shown,
        verify: Callable[[str], tuple[ExitCode, str] | None],
        tell: Callable[[NewSave | CheckedSave], None],
        *,
        every: float,
        settled: float = SETTLED,
        since: int | None = None,
    ) -> None:
        super().__init__(name="ftckpt-watch", daemon=True)
        self._since, self._best = since, since
        self._before = frozenset(before)
        self._files: dict[str, FilesOf] = {}
        self._folders = Folders(before)
        self._anew: set[str] = set()
        self._read, self._verify, self._tell = read, verify, tell
        self._every, self._settled = every, settled
        self._seen = dict(before)
        self._doubtful: dict[str, float] = {}
        self._waiting: dict[str, NewSave] = {}
        self._count, self._good = 0, 0
        self._looking = threading.Lock()
        self._silent: dict[str, int] = {}
        self._absent = self._unanswered = ""
        self._unread: list[UnreadSave] = []
        self._highest = -1
        self._ended, self._news = threading.Event(), threading.Event()

    def run(self) -> None:
        """Look until the end."""
        # A large save takes long to verify, and saves that come meanwhile are no hang.
        checking = threading.Thread(target=self._check_all, name="ftckpt-check", daemon=True)
        checking.start()
        while not self._ended.wait(self._every):
            self.look()
        checking.join()

    def note(self) -> None:
        """Note the files of what is there, before the command starts.

        A directory that is only touched then shows no save.
        """
        with self._looking:
            try:
                root = self._read()
            except FtckptError:
                return
            self._folders.note(root)
            # What shows no time of its own shows no touch either.
            known = [
                c for c in root.candidates if c.path in self._seen and c.entry.mtime is not None
            ]
            # The newest first: a start does not wait for all that a large root has kept.
            known.sort(key=lambda c: -1 if c.step is None else c.step, reverse=True)
            until = time.monotonic() + NOTING
            for candidate in known:
                if self._is_lower(candidate.step) and time.monotonic() > until:
                    return
                with suppress(FtckptError):
                    self._files[candidate.path] = files_of(root, candidate.entry)

    def _is_lower(self, step: int | None) -> bool:
        return step is not None and self._since is not None and step < self._since

    def _is_old(self, root: Root, save: NewSave) -> bool:
        """Whether a name shows nothing new: it was there before, and its files are as they were.

        The step does not decide: a training that goes on with the weights alone counts from 0.
        """
        if save.name.endswith(WEIGHTS):
            return True  # gc has thinned one
        if save.name not in self._before:
            return False
        before = self._files.pop(save.name, None)
        if before is None:  # not noted, so nobody knows
            return self._is_lower(save.step)
        try:
            entry = next(c.entry for c in root.candidates if c.path == save.name)
            self._files[save.name] = files_of(root, entry)
        except FtckptError:
            return False
        return self._files[save.name] == before

    def _goes_back(self, save: NewSave) -> bool:
        """Whether a save is of an older step than the last known good one."""
        return save.step is not None and self._best is not None and save.step < self._best

    def _check_all(self) -> None:
        while not self._ended.is_set():
            self._news.wait(self._every)
            self._news.clear()
            self._check()

    def look(self, *, ended: bool = False, last: bool = False) -> None:
        """Tell of saves that are new since the last look; a store that is away tells nothing.

        Args:
            ended: nobody writes any more.
            last: saves that cannot be read are told of as they are.
        """
        # When the command has ended the main thread looks too, and must not miss half a look.
        with self._looking:
            unread: list[UnreadSave] = []
            try:
                root = self._read()
                listed = shown(root)
                self._anew |= self._folders.look(root, ended=ended)
                known = {n: s for n, s in self._seen.items() if n not in self._anew}
                known |= {name: listed[name] for name in self._folders.resting}
                found = new_saves(root, known, unread)
            except FtckptError as error:
                self._absent = error.message
                return
            away = [one for one in unread if one.error.exit_code is ExitCode.UNAVAILABLE]
            self._absent = away[0].error.message if away else ""
            same = {save.name for save in found if self._is_old(root, save)}
            same = (same | self._folders.decided) - self._anew
            fresh = [save for save in found if save.name not in same]
            self._anew.difference_update(save.name for save in found)
            self._seen |= {save.name: listed[save.name] for save in found}
            steps = [one.step for one in fresh if one.step is not None]
            self._highest = max([self._highest, *steps])
            self._unread = [
                one
                for one in unread
                if one not in away and (one.save.step is None or one.save.step >= self._highest)
            ]
            cut, self._unread = (self._unread, []) if last else ([], self._unread)
            for one in cut:
                self._seen[one.save.name] = listed[one.save.name]
                self._count += 1
                numbered = one.save._replace(number=self._count)
                self._tell(CheckedSave(numbered, one.error.exit_code, one.error.message, 0.0))
            for save in fresh:
                self._count += 1
                again = save.name in self._folders.again
                numbered = save._replace(number=self._count, again=again)
                self._waiting.pop(save.name, None)
                self._doubtful.pop(save.name, None)  # those were other files
                self._waiting[save.name] = numbered
                self._tell(numbered)
        self._news.set()

    def _check(self) -> None:
        """Verify what waits, the newest first: it is what a restart needs."""
        for name, save in reversed(list(self._waiting.items())):
            if self._ended.is_set():
                return
            if time.monotonic() < self._doubtful.get(name, 0.0):
                continue
            begun = time.monotonic()
            verdict = self._verify(save.path)
            if verdict is None:
                self._silent[name] = self._silent.get(name, 0) + 1
                if self._silent[name] < _SILENT or self._ended.is_set():
                    continue
                verdict = ExitCode.INTERNAL, "ftckpt verify gives no answer"
            code, message = verdict
            away = code in (ExitCode.UNAVAILABLE, ExitCode.NO_RESOURCE)
            self._unanswered = message if away else ""
            if away:
                continue  # later
            doubt = code in (ExitCode.CORRUPT, ExitCode.INCOMPLETE, ExitCode.NOT_FOUND)
            if doubt and name not in self._doubtful:
                self._doubtful[name] = time.monotonic() + self._settled
                continue
            self._doubtful.pop(name, None)
            if self._waiting.get(name) is save:  # else it was saved anew meanwhile
                del self._waiting[name]
            newest = code is ExitCode.OK and save.number > self._good and not self._goes_back(save)
            if newest:
                self._good = save.number
                self._best = self._best if save.step is None else save.step
            self._tell(CheckedSave(save, code, message, time.monotonic() - begun, newest))
            if any(one.number > save.number for one in list(self._waiting.values())):
                return  # one that is newer has come

    @property
    def away(self) -> str:
        """Why the store does not answer; "" if it does, as far as is known."""
        return self._absent or (self._unanswered if self.busy else "")

    @property
    def moving(self) -> bool:
        """Whether the last look found files of a save that is being written over an older one."""
        return self._folders.moving

    @property
    def unread(self) -> bool:
        """Whether the last look found saves that cannot be read."""
        return bool(self._unread)

    @property
    def busy(self) -> bool:
        """Whether the newest save waits for its verdict."""
        return any(save.number == self._count for save in list(self._waiting.values()))

    def stop(self) -> None:
        """End the thread, and take one last look for saves."""
        self._ended.set()
        self._news.set()
        if self.ident is not None:
            self.join()
        self.look(ended=True)
