"""MaxText's side of `peers.py`: its own trainer, with what the compiler said of its training step printed as JSON.

Started by it, with MaxText's settings as arguments, in a Python that has MaxText.
"""

import importlib.util
import json
import sys
import time
from pathlib import Path

import jax

ROOT = Path(__file__).resolve().parents[2]


def counting(compile):
    """`Lowered.compile` that prints what the largest program so far holds and moves."""
    largest = [0]

    def wrapped(self, *args, **kwargs):
        began = time.perf_counter()
        program = compile(self, *args, **kwargs)
        seconds, memory = time.perf_counter() - began, program.memory_analysis()
        if memory.argument_size_in_bytes > largest[0]:
            from axonml_jax.ledger.compiled import moved

            largest[0] = memory.argument_size_in_bytes
            found = moved(program).get("all")
            sizes = {
                "temporaries": memory.temp_size_in_bytes,
                "arguments": largest[0],
                "moved": found.size if found else 0,
                "flops": program.cost_analysis()["flops"],
            }
            print(json.dumps({"compile_s": seconds, **sizes}), flush=True)
        return program

    return wrapped


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    jax.stages.Lowered.compile = counting(jax.stages.Lowered.compile)
    from absl import logging
    from maxtext.trainers.pre_train import train

    logging.use_absl_handler()
    logging.set_verbosity(logging.INFO)
    logging.set_stderrthreshold("info")
    base = Path(importlib.util.find_spec("maxtext").origin).parent / "configs" / "base.yml"
    train.main([sys.argv[0], str(base), *sys.argv[1:]])
