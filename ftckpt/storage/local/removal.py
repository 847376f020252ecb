"""Remove a local tree for good, through open directories.

Each directory is opened by its name in the one above, and never if it is a link, so that a link
that replaces a directory during the removal does not redirect it (as in CVE-2022-21658). Another
filesystem mounted in the tree is not entered.
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
    """Removes trees, continuing after failures.

    Attributes:
        freed: bytes of removed files that had no other name.
        failed: errors by path.
    """

    def __init__(self) -> None:
        self.freed = 0
        self.failed: dict[str, FtckptError] = {}

    def remove(self, name: str, folder: int, path: str, depth: int = 0) -> None:
        """Remove a file, a link or a directory with its content; absent is removed.

        Args:
            name: to remove.
            folder: its open directory.
            path: its path for the user.
            depth: number of directories above it in the tree.
        """
        before = len(self.failed)
        try:
            twice(lambda: self._remove(name, folder, path, depth))
        except FileNotFoundError:
            return
        except FtckptError as error:
            self.failed[path] = error
        except OSError as error:
            # ENOTEMPTY matters only if nothing in the directory has failed.
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
