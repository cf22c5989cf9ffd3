"""A worker ends when the process that drives it has died.

vLLM ends its workers when the engine core ends, and the core when the server asks it to; a server that was killed asks
nothing, and its engine would keep the GPU for ever.
"""

import os
import select
import signal
import threading
import time

from vllm.logger import init_logger

logger = init_logger("vllm.qerl")

GRACE = 10.0  # seconds that this process may take to end by itself


def end_with(driver: int) -> None:
    """Ends this process when the process ``driver`` of this machine has ended.

    Raises OSError if there is no such process.
    """
    if driver != os.getpid():
        threading.Thread(target=_watch, args=(os.pidfd_open(driver), driver), daemon=True, name="qerl-driver").start()


def _watch(handle: int, driver: int) -> None:
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.poll()  # a pidfd becomes readable when its process ends
    logger.error("the server's process %d has died: this one ends too", driver)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os.kill(os.getpid(), signal.SIGKILL)
