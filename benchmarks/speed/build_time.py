"""What it costs to build a training step: making the parallel model, tracing, lowering and compiling, against plain `jax.jit`.

Run: nice python benchmarks/speed/build_time.py (--models U-Net --ways Pipeline for some; --profile for where tracing spends it)
Shows: seconds of processor time, caches cleared before each build, and the ratio of trace + lower + compile to that of the
plain step of the same model on one device. Bars: 1.5 for DDP and FSDP, 2 for a pipeline, 30 s for its U-Net.
"""

import argparse
import cProfile
import pstats
import time

import axonml_jax as ax

ax.fake_devices(4)

import jax
import optax
from build_models import MODELS, WAYS

from axonml_jax.model.view import Mode, Variables, functionalize

BARS = {"DDP": 1.5, "FSDP": 1.5, "Pipeline": 2.0}
PHASES = ("make", "trace", "lower", "compile")


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=[""], help="only those whose name has this in it")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS), help="only these")
    parser.add_argument("--rows", type=int, default=32, help="rows of the global batch")
    parser.add_argument("--profile", action="store_true", help="print where making and tracing spend their time")
    return parser.parse_args()


def plain(model, params, loss_fn, batch):
    """The step on one device as one would write it: state in, state out."""
    view, variables = functionalize(model, params)
    tx, key = optax.adamw(1e-3), jax.random.key(0)

    def step(variables: Variables, opt_state, batch):
        def loss(params):
            bound = view.bind(Variables(params, variables.frozen, variables.state), key, Mode())
            return loss_fn(bound, batch), view.state_of(bound)

        (value, state), grads = jax.value_and_grad(loss, has_aux=True)(variables.params)
        updates, opt_state = tx.update(grads, opt_state, variables.params)
        return Variables(optax.apply_updates(variables.params, updates), variables.frozen, state), opt_state, value

    return jax.jit(step, donate_argnums=(0, 1)).trace, (variables, tx.init(variables.params), batch)


def parallel(way, model, params, loss_fn, batch):
    """The step of a facade."""
    made = WAYS[way](model, params)
    trainer = made.trainer(optax.adamw(1e-3), loss_fn)
    return trainer.train_step.trace, (trainer.state, made._placement.batch_layout.place(batch, made.mesh))


def build(make):
    """Seconds of processor time by phase, and the lowered text's size in operations."""
    jax.clear_caches()
    times = [time.process_time()]
    trace, args = make()
    times.append(time.process_time())
    traced = trace(*args)
    times.append(time.process_time())
    lowered = traced.lower()
    times.append(time.process_time())
    lowered.compile()
    times.append(time.process_time())
    return {phase: b - a for phase, a, b in zip(PHASES, times, times[1:], strict=False)}, lowered.as_text().count(" = ")


def row(name, times, size, base):
    spent = sum(times[phase] for phase in PHASES[1:])
    words = "".join(f"{times[phase]:9.2f}" for phase in PHASES)
    ratio = f"{spent / base:8.2f}" if base else " " * 8
    print(f"{name:<34}{words}{spent:9.2f}{ratio}{size:10,}", flush=True)
    return spent


def main():
    options = parse()
    print(f"{'':<34}{''.join(f'{phase:>9}' for phase in (*PHASES, 'step'))}{'ratio':>8}{'operations':>10}")
    over = []
    for name in (name for name in MODELS if any(part in name for part in options.models)):
        model, params, loss_fn, batch = MODELS[name]()
        given = (model, params, loss_fn, batch(options.rows))
        base = row(f"{name}: plain", *build(lambda given=given: plain(*given)), 0.0)
        for way in options.ways:
            profile = cProfile.Profile()
            try:
                if options.profile:
                    jax.clear_caches()
                    profile.runcall(
                        lambda way=way, given=given: (lambda trace, args: trace(*args))(*parallel(way, *given))
                    )
                    pstats.Stats(profile).sort_stats("cumulative").print_stats("axonml_jax", 40)
                spent = row(f"{name}: {way}", *build(lambda way=way, given=given: parallel(way, *given)), base)
                over += [f"{name}: {way}"] * (spent > BARS[way] * base)
            except ValueError as error:  # a scan's blocks are one module: a pipeline cannot divide them
                print(f"{name + ': ' + way:<34}{str(error)[:100]}")
    print(f"over the bar: {', '.join(over) or 'none'}")


if __name__ == "__main__":
    main()
