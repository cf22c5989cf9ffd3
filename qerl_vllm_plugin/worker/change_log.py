"""When each policy came into service: written by the worker that serves it, read by every process that tells of it.

The engine may answer through several API server processes, any of which may change the policy. The one place that all
changes pass is the worker, and the moment of a change is that at which it made it: the engine is paused then, so that
no token's time lies near. The log is a file without a name in memory of the worker, which the others map, as
/proc/PID/fd/NUMBER; the clock is the machine's (time.monotonic), which also stamps the tokens.
"""

import mmap
import os
import struct
import time
from bisect import bisect_right

KEPT = 10_000  # changes that are remembered
_WORD, _ENTRY = struct.Struct("<Q"), struct.Struct("<dq")  # an entry: moment and version
_COUNT, _LOST, _PAUSED, _HEAD = (_WORD.size * i for i in range(4))  # words of several writers, before the entries

Span = tuple[float, float]  # seconds of time.monotonic()


class ChangeLog:
    """The changes of one engine's policy, whether the engine was given up, and whether somebody has paused it."""

    def __init__(self, path: str | None = None) -> None:
        """A new log, or that of another process, under the path which that one has. Raises OSError."""
        size = _HEAD + KEPT * _ENTRY.size
        if path is None:
            self._number = os.memfd_create("qerl-changes")
            os.posix_fallocate(self._number, 0, size)
            self.path = f"/proc/{os.getpid()}/fd/{self._number}"
        else:
            self._number, self.path = os.open(path, os.O_RDWR | os.O_CLOEXEC), path
        self._memory = mmap.mmap(self._number, size)

    def add(self, version: int) -> None:
        """To be called by the worker, while the engine is paused; the version may be the one before, where the noise
        has changed."""
        count = self.count
        _ENTRY.pack_into(self._memory, self._place(count), time.monotonic(), version)
        _WORD.pack_into(self._memory, _COUNT, count + 1)

    @property
    def count(self) -> int:
        """How many changes there have been; one of the noise counts, too."""
        return self._word(_COUNT)

    def lose(self) -> None:
        """From now on ``is_lost`` is true for every process that has the log."""
        _WORD.pack_into(self._memory, _LOST, 1)

    @property
    def is_lost(self) -> bool:
        return bool(self._word(_LOST))

    @property
    def is_paused(self) -> bool:
        """Whether somebody wants the engine to stand still (vLLM's own /pause or /sleep); no change lets it go on."""
        return bool(self._word(_PAUSED))

    @is_paused.setter
    def is_paused(self, is_so: bool) -> None:
        _WORD.pack_into(self._memory, _PAUSED, is_so)

    def text(self, spans: list[Span]) -> str:
        """FIRST, or FIRST-LAST where another policy, or another noise, came into service in between."""
        count = self.count
        numbers = range(max(0, count - KEPT), count)
        ends = (min(span[0] for span in spans), max(span[1] for span in spans))
        found = [numbers[max(bisect_right(numbers, moment, key=self._moment) - 1, 0)] for moment in ends]
        first, last = (_ENTRY.unpack_from(self._memory, self._place(number))[1] for number in found)
        return str(first) if found[0] == found[1] else f"{first}-{last}"

    def _moment(self, number: int) -> float:
        return _ENTRY.unpack_from(self._memory, self._place(number))[0]

    def _word(self, place: int) -> int:
        return int(_WORD.unpack_from(self._memory, place)[0])

    @staticmethod
    def _place(number: int) -> int:
        return _HEAD + number % KEPT * _ENTRY.size
