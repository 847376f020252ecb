"""Remove a local tree for good, by open directories alone.

Each directory is opened by its name in the one above, and never if it is a link, so that a link
put in the place of a directory while it is being removed does not redirect what follows
(as in CVE-2022-21658). Another filesystem that is mounted in the tree is not entered.
"""

from __future__ import annotations

import errno
import os
import stat

from ftckpt.errors import FtckptError

from .folders import opened
from .oserror import translate, twice

# No checkpoint is as deep, and each level takes a descriptor.
_DEEPEST = 100


class Removal:
    """Removes trees, and goes on with the rest where something cannot be removed.

    Attributes:
        freed: bytes of the files that are gone, and had no other name.
        failed: what could not be removed, by its path, and why.
    """

    def __init__(self) -> None:
        self.freed = 0
        self.failed: dict[str, FtckptError] = {}

    def remove(self, name: str, folder: int, path: str, depth: int = 0) -> None:
        """Remove a file, a link or a directory with all that lies in it; absent is removed.

        Args:
            name: what to remove.
            folder: the open directory that it lies in.
            path: what it is called to the user.
            depth: how many directories lie above it in the tree.
        """
        before = len(self.failed)
        try:
            twice(lambda: self._remove(name, folder, path, depth))
        except FileNotFoundError:
            return
        except FtckptError as error:
            self.failed[path] = error
        except OSError as error:
            # That a directory is not empty is news only where nothing in it was to blame.
            if error.errno != errno.ENOTEMPTY or len(self.failed) == before:
                self.failed[path] = translate(error, path, "remove", path)

    def _remove(self, name: str, folder: int, path: str, depth: int) -> None:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if not stat.S_ISDIR(found.st_mode):
            os.unlink(name, dir_fd=folder)
            if stat.S_ISREG(found.st_mode) and found.st_nlink < 2:
                self.freed += found.st_size
            return
        if found.st_dev != os.fstat(folder).st_dev:
            raise OSError(errno.EXDEV, "another filesystem is mounted there")
        if depth == _DEEPEST:
            raise OSError(errno.ENAMETOOLONG, "it is nested too deeply")
        with opened(name, folder) as below:
            for one in sorted(os.listdir(below)):
                self.remove(one, below, f"{path}/{one}", depth + 1)
        os.rmdir(name, dir_fd=folder)
