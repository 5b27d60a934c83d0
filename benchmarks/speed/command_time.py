"""What the commands cost that need no devices: processor seconds of fresh processes that take turns.

Run: python benchmarks/speed/command_time.py --rounds 10
Shows: the least and the median user and system time of every command, interpreter start counted; bar 0.8 s for each.
"""

import argparse
import resource
import subprocess
import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what all folders share

from paired import machine

COMMANDS = (
    "--help", "--version", "train --help", "explain --help", "plan --help", "launch --help", "devices --help",
    "schedule --help", "schedule --stages 4 --microbatches 8", "train none.yaml", "launch none.py",
)  # fmt: skip
BAR = 0.8


def seconds(command: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "axonml_jax", *command.split()], check=False, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="number of fresh processes of each command")
    rounds = parser.parse_args().rounds
    times: dict[str, list[float]] = {command: [] for command in COMMANDS}
    for round_ in range(-1, rounds):  # the first round fills the page cache and is not counted
        for command in COMMANDS:
            spent = seconds(command)
            if round_ >= 0:
                times[command].append(spent)
    print(machine("jax", "jsonargparse", "numpy"))
    for command, values in times.items():
        print(f"{command:<40} least {min(values):.2f} s, median {median(values):.2f} s")
    slow = [command for command, values in times.items() if min(values) > BAR]
    print(f"above the bar of {BAR} s: {', '.join(slow) or 'none'}")


if __name__ == "__main__":
    main()
