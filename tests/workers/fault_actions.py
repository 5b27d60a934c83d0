"""What a fault does to the process that it happens in (see fault_rank.py)."""

import os
import resource
import signal
import subprocess
import time
from pathlib import Path

import numpy as np

ROOM = 1 << 13


def die(number=signal.SIGKILL):
    os.kill(os.getpid(), number)
    time.sleep(60)


def fill(path):
    """Leave next to nothing of the file system that a file is on."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue
        # What a line of records needs is left.
        file.truncate(max(0, file.tell() - ROOM))


class EndingRows:
    """Samples, whose reader ends with status 0 after so many of them, once."""

    def __init__(self, rows, count, happened):
        self.rows, self.count, self.happened = rows, count, happened

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        self.count -= 1
        if self.count < 0 and not self.happened.exists():
            self.happened.touch()
            os._exit(0)
        return self.rows[index]


def limit_files(size):
    """No file of this process may become larger; what it writes beyond is an error."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def use_up_memory():
    """This process may have little more memory than it has, and asks for a lot."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 28), resource.RLIM_INFINITY))
    np.ones(1 << 27)


def jump(hours):
    """The clock, as Python sees it, shows another time."""
    real = time.time
    time.time = lambda: real() + 3600 * hours


def wake_later(seconds):
    """A process of its own lets this one, once it is stopped, go on."""
    wake = f"sleep {seconds}; kill -CONT {os.getpid()}"
    subprocess.Popen(["sh", "-c", wake], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def only_reading(folder, begin):
    """Whether a folder may only be read, for all processes."""
    steps = [["mount", "--bind", folder, folder], ["mount", "-o", "remount,bind,ro", folder]]
    for command in steps if begin else [["umount", folder]]:
        deadline = time.monotonic() + 60
        while subprocess.run(command, check=False).returncode:  # busy while a save before this one writes
            if time.monotonic() > deadline:
                raise TimeoutError(" ".join(map(str, command)))
            time.sleep(0.2)
