"""Does the planner rank plans as this machine does? Predicted against measured step times of randomly drawn plans.

Run: PYTHONPATH=. python benchmarks/speed/planner_rank.py [--plans 20] [--steps 15]; 8 simulated devices, which share this
machine's cores.

Plans are drawn with seed 0 from the whole enumeration for a small GPT; hardware is measured first, then the plans take
turns step by step. Shows both times of every plan (the median of its steps), Spearman's rank correlation (bar: 0.85), the
median error (bar: 25%), and the measured time of the planner's choice over the best (bar: 1.1).
"""

import argparse
import random
import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what all folders share

from paired import alternate

import axonml_jax as ax

DEVICES, BATCH, LENGTH = 8, 32, 64


def prepared(asked, one):
    """A step of the plan, compiled and taken twice."""
    import jax
    import numpy as np
    import optax
    from flax import nnx

    from axonml_jax.cli.tasks import loss_fn
    from axonml_jax.models.transformer import Transformer

    found = one.candidate
    mesh = ax.make_mesh(**found.mesh)
    model = Transformer(found.model(asked.model), rngs=nnx.Rngs(0))
    trainer = ax.parallelize(model, mesh, found.plan(asked.precision)).trainer(optax.adamw(1e-3), loss_fn)
    rows = np.random.default_rng(0).integers(0, asked.model.vocab_size, (BATCH, LENGTH + 1)).astype(np.int32)
    batch = {"tokens": rows[:, :-1], "targets": rows[:, 1:]}
    step = lambda: jax.block_until_ready(trainer.step(batch))
    for _ in range(2):
        step()
    return step


def spearman(a: list[float], b: list[float]) -> float:
    """Rank correlation."""
    import numpy as np

    ranks = [np.argsort(np.argsort(values)) for values in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=20)
    parser.add_argument("--steps", type=int, default=15)
    options = parser.parse_args()
    ax.fake_devices(DEVICES)
    from axonml_jax.models.config import TransformerConfig
    from axonml_jax.planner.search import candidates, exactly
    from axonml_jax.planner.verify import measure

    sizes = {"num_layers": 4, "hidden_size": 64, "num_heads": 8, "vocab_size": 256, "max_length": LENGTH}
    model = TransformerConfig(**sizes, norm="layernorm", activation="gelu", position="learned", tie_embeddings=True)
    here = measure(DEVICES, model=model)
    print(f"{here}\n")
    answer = ax.plan(model, num_devices=DEVICES, hardware=here, global_batch=BATCH, length=LENGTH, precision=None)
    every = list(candidates(model, DEVICES, global_batch=BATCH, length=LENGTH))
    rng, drawn = random.Random(0), []
    while len(drawn) < options.plans:
        try:
            drawn.append(exactly(answer.asked, rng.choice(every)))
        except ValueError:
            continue  # a size that its schedule refuses
    plans = [answer.best, *drawn]
    steps = [prepared(answer.asked, one) for one in plans]
    times = [median(each) for each in alternate(dict(enumerate(steps)), options.steps).values()]
    for one, took in zip(plans, times, strict=True):
        print(f"predicted {1e3 * one.price.time:8.1f} ms  measured {1e3 * took:8.1f} ms  {one.candidate}")
    told, found = [one.price.time for one in drawn], times[1:]
    errors = sorted(abs(price / took - 1) for price, took in zip(told, found, strict=True))
    print(f"\n{len(every):,} legal plans; Spearman {spearman(told, found):.3f} (bar 0.85)")
    print(f"median error {100 * errors[len(errors) // 2]:.0f}% (bar 25%)")
    print(f"the planner's choice takes {times[0] / min(times):.2f} of the best measured (bar 1.1)")


if __name__ == "__main__":
    main()
