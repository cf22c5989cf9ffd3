"""A large GPU as a smaller one: another process holds the rest of its memory for as long as a benchmark lasts.

A limit inside torch would count memory that the engine has handed back as still in use.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from qerl_recipes.memory_parts import gigabytes


@contextmanager
def ballast(left: int) -> Iterator[int]:
    """Hold all memory of the GPU but ``left`` bytes while this lasts -> bytes held.

    Raises ValueError if less than that is free.
    """
    line = [sys.executable, "-m", __name__, str(left)]
    holder = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdin is not None and holder.stdout is not None
    try:
        answer = holder.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process that holds memory ended; its message is above. Command: {' '.join(line)}")
        held = json.loads(answer)["held"]
        if held < 0:
            raise ValueError(
                f"{gigabytes(left)} were asked for and {gigabytes(left + held)} of this GPU are free; ask for less, or "
                "end what runs there"
            )
        yield held
    finally:
        holder.stdin.close()  # it waits for this, and for nothing else, so that it never outlives its user
        holder.wait()
        holder.stdout.close()


def hold(left: int) -> None:
    """What the other process does: allocate, say how much, and wait for the end of its input."""
    import torch

    free, _ = torch.cuda.mem_get_info()
    block = torch.empty(max(free - left, 0), dtype=torch.uint8, device="cuda")
    print(json.dumps({"held": block.numel() if free >= left else free - left}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    hold(int(sys.argv[1]))
