"""Memory of a step under context parallelism, from compiled programs: activations by ranks, the longest sequence that fits.

Nothing runs: a step of a GPT of 100 M parameters is compiled for simulated devices, and its temporaries are read.

    python benchmarks/memory/context_memory.py --length 8192 --ranks 1 2 4 8
    python benchmarks/memory/context_memory.py --longest --gib 16 --ranks 1 2 4 8
"""

import argparse

import axonml_jax as ax

ax.fake_devices(8)

import jax

from axonml_jax.models.config import TransformerConfig
from axonml_jax.planner.verify import abstract_step

GIB = 2**30


def bytes_of(length: int, ranks: int, method: str, layers: int) -> tuple[int, int]:
    """Bytes of temporaries and of arguments on one device, for one sequence of a length."""
    config = TransformerConfig(
        vocab_size=8192, num_layers=layers, hidden_size=768, num_heads=12, max_length=length, scan_layers=True,
        param_dtype="float32",
    )  # fmt: skip
    mesh = ax.make_mesh(context=ranks, devices=jax.devices()[:ranks])
    plan = ax.Plan(context=ax.Context(method=method), precision="bf16", remat="full")  # type: ignore[arg-type]
    step, state, batch = abstract_step(plan, config, mesh, 1, length)
    memory = step.lower(state, batch).compile().memory_analysis()
    return memory.temp_size_in_bytes, memory.argument_size_in_bytes


def longest(ranks: int, method: str, layers: int, limit: int) -> int:
    """The longest sequence, in powers of two and their halves between, whose step fits."""
    length = 4096
    while sum(bytes_of(2 * length, ranks, method, layers)) <= limit:
        length *= 2
    return length + length // 2 if sum(bytes_of(length + length // 2, ranks, method, layers)) <= limit else length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--methods", nargs="+", default=["gather", "ring"])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--longest", action="store_true")
    parser.add_argument("--gib", type=float, default=16)
    given = parser.parse_args()
    for method in given.methods:
        for ranks in given.ranks:
            if given.longest:
                found = longest(ranks, method, given.layers, int(given.gib * GIB))
                print(f"{method:8} N={ranks}: {found:,} positions fit {given.gib:g} GiB", flush=True)
            else:
                temporaries, arguments = bytes_of(given.length, ranks, method, given.layers)
                print(
                    f"{method:8} N={ranks}: temporaries {temporaries / 2**20:,.0f} MiB, arguments {arguments / 2**20:,.0f} MiB "
                    f"({given.length:,} positions)",
                    flush=True,
                )


if __name__ == "__main__":
    main()
