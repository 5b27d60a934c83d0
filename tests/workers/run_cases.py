"""One process of a launch: `python run_cases.py PORT NUM_PROCESSES PROCESS_ID` runs every eager case, a JSON line each."""

import json
import sys
import traceback

import eager_cases

import axonml_jax as ax


def main(port, num_processes, process_id):
    world = ax.init(coordinator=f"127.0.0.1:{port}", num_processes=num_processes, process_id=process_id, timeout=30)
    for name, case in eager_cases.CASES.items():
        try:
            case(world)
            failure = None
        except Exception:
            failure = traceback.format_exc()
        print(json.dumps({"case": name, "failure": failure}), flush=True)
        if failure:
            break  # the ranks may no longer agree on what comes next
    ax.shutdown()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
