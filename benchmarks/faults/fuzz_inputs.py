"""Documents that others have written, changed at random: each ends in a named error or is read, and nothing else happens.

    python benchmarks/faults/fuzz_inputs.py --cases 10000 --seed 0 [--only YAML tokenizers]

A case fails when it ends in any other exception, takes more than two seconds of the processor or 64 MiB, opens a file outside
of its folder, makes a link, starts a process, calls another machine or unpickles. Every case has a seed of its own, which is
printed with it: `--only KIND --first N --cases 1` repeats case N. Prints a line per failure and the table of docs/security.md;
the exit status is the number of failures (at most 99).
"""

import argparse
import collections
import contextlib
import faulthandler
import gc
import logging
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from model_readers import READERS

SECONDS, BYTES = 2.0, 64 * 2**20
FORBIDDEN = (
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "pickle.find_class",
    "os.symlink",
    "os.link",
)
_IMPORTED = tuple(str(Path(path).resolve()) for path in {*sys.path, sys.prefix, sys.base_prefix} if path)
_KERNEL = ("/proc/", "/sys/", "/dev/null")


class TooLong(BaseException):
    """A case that has used up its time; no `except Exception` may hide it."""


@dataclass
class Watch:
    """What happens while a case runs, as Python's audit events tell it."""

    folder: str | None = None
    seen: list[str] = field(default_factory=list)

    def __call__(self, event: str, arguments: tuple) -> None:
        if self.folder is None:
            return
        if event in FORBIDDEN:
            self.seen.append(f"{event} {str(arguments)[:80]}")
        elif event == "open" and isinstance(arguments[0], str | bytes):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            if not path.startswith((self.folder, *_IMPORTED, *_KERNEL)):
                self.seen.append(f"opened {path}")
        elif event == "socket.connect" and "127.0.0.1" not in str(arguments[1]):
            self.seen.append(f"called {arguments[1]}")


WATCH = Watch()
sys.addaudithook(WATCH)


def peak() -> int:
    """The most memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def attempt(kind: str, number: int, seed: int, folder: Path, prepared) -> tuple[str, str]:
    """One case.

    Returns:
      "read", "refused" or "failed", and what there is to say.
    """
    reader, draw = READERS[kind], random.Random(f"{seed} {kind} {number}")
    WATCH.folder, WATCH.seen, before = str(folder.resolve()), [], peak()
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        try:
            reader.case(folder, prepared, draw)
            ended, said = "read", ""
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except reader.errors as error:
        ended, said = "refused", str(error)
        if not said or len(said) > 100_000 or (reader.says_where and str(folder) not in said):
            ended, said = "failed", f"the error does not say what and where: {type(error).__name__}: {said[:200]}"
    except TooLong:
        ended, said = "failed", f"took more than {SECONDS:g} s of the processor: {_place()}"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        ended, said = "failed", f"{type(error).__name__}: {str(error)[:200]} {_place()}"
    finally:
        WATCH.folder = None
    if WATCH.seen:
        ended, said = "failed", f"it {'; '.join(WATCH.seen[:3])}"
    if (grown := peak() - before) > BYTES:
        ended, said = "failed", f"took {grown / 2**20:.0f} MiB"
    return ended, said


def _place() -> str:
    frames = traceback.extract_tb(sys.exc_info()[2])
    return " < ".join(f"{os.path.basename(frame.filename)}:{frame.lineno}" for frame in frames[:-6:-1])


def run(
    cases: int, seed: int, only: list[str] | None = None, first: int = 0, tell=print
) -> dict[str, collections.Counter]:
    """A number of cases, spread over the kinds by their weights; how they ended, by kind."""
    kinds = only or list(READERS)
    whole, counts = sum(READERS[kind].weight for kind in kinds), collections.defaultdict(collections.Counter)
    signal.signal(signal.SIGPROF, _end)
    for kind in kinds:
        share = -(-cases * READERS[kind].weight // whole)
        with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
            folder = Path(name).resolve()
            prepared = READERS[kind].prepare(folder)
            stack.callback(faulthandler.cancel_dump_traceback_later)
            attempt(kind, -1, seed, folder, prepared)  # what it imports takes memory once
            for number in range(first, first + share):
                if number % 100 == 0:
                    gc.collect()  # what earlier cases have left is not this one's memory
                faulthandler.dump_traceback_later(60 * SECONDS, exit=True)  # one that waits, or stays in C code
                ended, said = attempt(kind, number, seed, folder, prepared)
                counts[kind][ended] += 1
                if ended == "failed":
                    tell(f"FAILED {kind}, case {number} of seed {seed}: {said}")
    return counts


def _end(*_):
    raise TooLong


def table(counts: dict[str, collections.Counter]) -> str:
    """As docs/security.md has it."""
    ways = ("refused", "read", "failed")
    row = lambda name, each: (
        " | ".join([f"| {name}", *(f"{n:,}" for n in (each.total(), *(each[way] for way in ways)))]) + " |"
    )
    rows = [row(kind, each) for kind, each in counts.items()]
    whole = row("all", sum(counts.values(), collections.Counter()))
    head = "| Documents | cases | refused by name | read | failed |\n| --- | --- | --- | --- | --- |"
    return "\n".join([head, *rows, whole])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=list(READERS))
    given = parser.parse_args()
    logging.getLogger("axonml_jax").setLevel(logging.ERROR)  # strangers are told of
    begun = time.process_time()
    counts = run(given.cases, given.seed, given.only, given.first)
    print(f"{table(counts)}\n\nseed {given.seed}, {time.process_time() - begun:.0f} s of the processor", flush=True)
    return min(99, sum(each["failed"] for each in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
