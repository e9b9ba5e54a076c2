"""A stream to a full disk."""

from __future__ import annotations

import errno
import io


class FullDisk(io.StringIO):
    """Takes nothing."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")
