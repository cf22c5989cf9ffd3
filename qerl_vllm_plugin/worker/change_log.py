"""Log when each policy came into service: the worker writes the log, and every API server process reads it.

The engine may answer through several API server processes, and any of them may change the policy. All changes pass
through the worker, which logs the time at which it made each. The engine is paused then, so no token's time lies near.
The log is an unnamed file in the worker's memory, which the other processes map as /proc/PID/fd/NUMBER. Its clock is
the machine's (time.monotonic), which also stamps the tokens.
"""

import mmap
import os
import struct
import time
from bisect import bisect_right

KEPT = 10_000  # the number of latest changes that are remembered
_WORD, _ENTRY = struct.Struct("<Q"), struct.Struct("<dq")  # an entry holds a time and a version
_COUNT, _LOST, _PAUSED, _HEAD = (_WORD.size * i for i in range(4))  # offsets: words any process writes, then entries

Span = tuple[float, float]  # first and last time, in seconds of time.monotonic()


class ChangeLog:
    """Share one engine's log among its processes: its changes, and whether it is lost or paused by somebody."""

    def __init__(self, path: str | None = None) -> None:
        """Create a log, or map the log of another process at the ``path`` which that one has. Raises OSError."""
        size = _HEAD + KEPT * _ENTRY.size
        if path is None:
            self._number = os.memfd_create("qerl-changes")
            os.posix_fallocate(self._number, 0, size)
            self.path = f"/proc/{os.getpid()}/fd/{self._number}"
        else:
            self._number, self.path = os.open(path, os.O_RDWR | os.O_CLOEXEC), path
        self._memory = mmap.mmap(self._number, size)

    def add(self, version: int) -> None:
        """Log a change that the worker makes now, with the engine paused; a change of the noise keeps the version."""
        count = self.count
        _ENTRY.pack_into(self._memory, self._place(count), time.monotonic(), version)
        _WORD.pack_into(self._memory, _COUNT, count + 1)

    @property
    def count(self) -> int:
        """Return the number of entries: the version served at the log's start, and every change, of the noise too."""
        return self._word(_COUNT)

    def lose(self) -> None:
        """Mark the engine as lost, for every process that has the log."""
        _WORD.pack_into(self._memory, _LOST, 1)

    @property
    def is_lost(self) -> bool:
        return bool(self._word(_LOST))

    @property
    def is_paused(self) -> bool:
        """Return True if somebody has paused the engine (vLLM's /pause or /sleep); a change does not resume it then."""
        return bool(self._word(_PAUSED))

    @is_paused.setter
    def is_paused(self, is_so: bool) -> None:
        _WORD.pack_into(self._memory, _PAUSED, is_so)

    def text(self, spans: list[Span]) -> str:
        """Return the versions that served ``spans``: FIRST, or FIRST-LAST if the policy or noise changed in between."""
        count = self.count
        numbers = range(max(0, count - KEPT), count)
        ends = (min(span[0] for span in spans), max(span[1] for span in spans))
        entries = [numbers[max(bisect_right(numbers, moment, key=self._moment) - 1, 0)] for moment in ends]
        first, last = (_ENTRY.unpack_from(self._memory, self._place(number))[1] for number in entries)
        return str(first) if entries[0] == entries[1] else f"{first}-{last}"

    def _moment(self, number: int) -> float:
        return _ENTRY.unpack_from(self._memory, self._place(number))[0]

    def _word(self, place: int) -> int:
        return int(_WORD.unpack_from(self._memory, place)[0])

    @staticmethod
    def _place(number: int) -> int:
        return _HEAD + number % KEPT * _ENTRY.size
