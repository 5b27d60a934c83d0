"""How long the planner searches: CPU seconds by number of devices, for Llama 3 70B on TPU v5p.

Run: python benchmarks/planner_search.py [--devices 256 1024 4096]. Starts no devices. The bar is 10 s for 4,096.
"""

import argparse
import time

import axonml_jax as ax
from axonml_jax.models.presets import preset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[256, 1024, 4096])
    for count in parser.parse_args().devices:
        start = time.process_time()
        answer = ax.plan(preset("llama3-70b"), num_devices=count, hardware="v5p", global_batch=count)
        print(f"{count:>6} devices  {time.process_time() - start:5.1f} s  {answer.best.candidate}")


if __name__ == "__main__":
    main()
