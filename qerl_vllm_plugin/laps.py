"""How long the parts of a change take, one after the other."""

import time


class Laps:
    """``seconds`` by part, in the order in which they ended; a part that ends again goes on.

    They are the host's: what a GPU has been asked to do and nobody has waited for is in no part, or in a later one.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def end(self, part: str) -> None:
        """What has passed since the end of the part before belongs to this one."""
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now
