"""A process that makes a step when it is told to: what `ranks.py` starts, and the two sides of `torch_ddp.py` do."""

import os
import sys

TURNS, READY = "BENCHMARK_TURNS", "ready\n"


def wait_for_turn() -> None:
    """Say that the next step may begin, and wait for a line; nothing where nobody takes turns."""
    if TURNS in os.environ:
        print(READY, end="", flush=True)
        sys.stdin.readline()
