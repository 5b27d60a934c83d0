"""A model of many small programs that hold constants where others hold variables: in carries, operands, results, branches."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

F64 = jnp.float64
DEPTH, WIDTH = 3, 4


def _block(x, w):
    return jnp.tanh(x @ w)


def carries_a_python_number(weights, x):
    def body(carry, w):
        x, total = carry
        x = _block(x, w)
        return (x, total + jnp.mean(x**2)), None

    (x, total), _ = jax.lax.scan(body, (x, 0.0), weights["stack"])
    return x, total


def carries_a_number_that_nothing_changes(weights, x):
    (x, total), _ = jax.lax.scan(lambda c, w: ((_block(c[0], w) + c[1], c[1]), None), (x, 0.5), weights["stack"])
    return x, total


def resets_its_carry_to_a_constant(weights, x):
    def body(carry, w):
        x, before = carry
        return (_block(x, w) + before, 0.25), None

    start = jnp.sum(weights["head"])
    (x, total), _ = jax.lax.scan(body, (x, start), weights["stack"])
    return x, total


def returns_a_constant_every_trip(weights, x):
    x, ones = jax.lax.scan(lambda x, w: (_block(x, w), 1.0), x, weights["stack"])
    return x, jnp.sum(ones)


def returns_nothing_but_constants(weights, x):
    _, ones = jax.lax.scan(lambda c, w: (0, 1.0), 0, weights["stack"])
    return x @ weights["head"], jnp.sum(ones)


def hands_what_it_reads_through(weights, x):
    def body(x, w):
        return _block(x, w), (w, x)

    x, (ws, xs) = jax.lax.scan(body, x, weights["stack"])
    return x, jnp.sum(ws**2) + jnp.mean(xs)


def swaps_its_carries(weights, x):
    (x, y), _ = jax.lax.scan(lambda c, w: ((c[1], _block(c[0], w)), None), (x, 2.0 * x), weights["stack"])
    return x + y, 0.0


def swaps_a_carry_with_a_number(weights, x):
    def body(carry, w):
        x, a, b = carry
        return (_block(x, w) * a, b, 1.0), None

    (x, a, b), _ = jax.lax.scan(body, (x, 3.0, jnp.sum(weights["head"])), weights["stack"])
    return x, a + b


def scans_weights_inside_a_scan(weights, x):
    def inner(carry, w):
        return (_block(carry[0], w), 1.0), 2.0

    def outer(x, w):
        (x, one), twos = jax.lax.scan(inner, (x, 0.0), jnp.stack([w, w.T]))
        return x, one + jnp.sum(twos)

    x, sums = jax.lax.scan(outer, x, weights["stack"])
    return x, jnp.sum(sums)


def scans_backwards_and_unrolled(weights, x):
    def body(carry, w):
        return (_block(carry[0], w), 0.0, carry[2] + 1), (1.0, carry[1])

    (x, _, count), (ones, _) = jax.lax.scan(body, (x, 0.0, 0), weights["stack"], reverse=True, unroll=2)
    return x, jnp.sum(ones) + count


def chooses_between_constants(weights, x):
    def body(carry, w):
        x, total = carry
        extra = jax.lax.cond(w[0, 0] > 0, lambda w: jnp.sum(w), lambda w: jnp.zeros((), F64), w)
        other = jax.lax.cond(w[0, 0] > 0, lambda: 1.0, lambda: 2.0)
        return (_block(x, w), total + extra + other), jax.lax.switch(x.shape[0] % 3, [lambda: 0, lambda: 1, lambda: 2])

    (x, total), _ = jax.lax.scan(body, (x, 0.0), weights["stack"])
    other = jax.lax.switch(jnp.int32(jnp.sum(weights["head"]) > 0) + 1, [lambda: 1.0, lambda: 2.0, lambda: 3.0])
    return x, total + other


def loops_while_a_number_is_small(weights, x):
    def body(x, w):
        scale, _ = jax.lax.while_loop(lambda c: c[1] < 3, lambda c: (2.0, c[1] + 1), (1.0, 0))
        return _block(x, w) * scale, jax.lax.fori_loop(0, 2, lambda i, c: c * 0 + 1.0, 0.0)

    x, ones = jax.lax.scan(body, x, weights["stack"])
    return x, jnp.sum(ones)


def calls_functions_that_return_constants_and_their_arguments(weights, x):
    constant = jax.jit(lambda x: (0.0, x, 1.0))

    def body(carry, w):
        zero, w, one = constant(w)
        return (_block(carry[0], w), one), zero

    (x, one), zeros = jax.lax.scan(body, (x, 0.0), weights["stack"])
    zero, head, one = constant(weights["head"])
    return x @ head, one + zero + jnp.sum(zeros)


@jax.custom_vjp
def _scaled(x, factor):
    return x * factor, 1.0


_scaled.defvjp(lambda x, factor: ((x * factor, 1.0), factor), lambda factor, ct: (ct[0] * factor, 0.0))


@jax.custom_jvp
def _clipped(x):
    return jnp.minimum(x, 0.9), 1.0


_clipped.defjvp(lambda given, moved: (_clipped(*given), (moved[0], 0.0)))


def has_derivatives_of_its_own(weights, x):
    def body(carry, w):
        x, one = _scaled(_block(carry[0], w), 0.5)
        x, two = _clipped(x)
        return (x, one), two

    (x, one), twos = jax.lax.scan(body, (x, 0.0), weights["stack"])
    x, _ = _scaled(x, 2.0)
    return x, one + jnp.sum(twos)


def recomputes_a_body_that_returns_constants(weights, x):
    body = jax.checkpoint(lambda c, w: ((_block(c[0], w), 1.0), 0.0))
    (x, one), _ = jax.lax.scan(body, (x, 0.0), weights["stack"])
    return x, one


def unrolls_blocks_that_return_constants(weights, x):
    block = jax.jit(lambda x, w, total: (_block(x, w), 0.5, total))
    total = 0.0
    for i in range(DEPTH):
        x, half, total = block(x, weights["stack"][i], total)
    return x, half + total


def returns_its_arguments_and_a_constant(weights, x):
    return x, 0.0


UNTYPED = (
    carries_a_python_number,
    resets_its_carry_to_a_constant,
    swaps_a_carry_with_a_number,
    chooses_between_constants,
    has_derivatives_of_its_own,
)
"""Programs that typed mode refuses: a loop of theirs starts from a number and carries what differs from rank to rank."""

PROGRAMS = (
    *UNTYPED,
    carries_a_number_that_nothing_changes,
    returns_a_constant_every_trip,
    returns_nothing_but_constants,
    hands_what_it_reads_through,
    swaps_its_carries,
    scans_weights_inside_a_scan,
    scans_backwards_and_unrolled,
    loops_while_a_number_is_small,
    calls_functions_that_return_constants_and_their_arguments,
    recomputes_a_body_that_returns_constants,
    unrolls_blocks_that_return_constants,
    returns_its_arguments_and_a_constant,
)
"""`program(weights, x) -> (y, number)`."""


def programs(typed):
    """Those that a plan takes."""
    return tuple(program for program in PROGRAMS if not (typed and program in UNTYPED))


def _weights(program):
    keys = jax.random.split(jax.random.key(PROGRAMS.index(program)), 2)
    return {
        "stack": jax.random.normal(keys[0], (DEPTH, WIDTH, WIDTH), F64) / 2,
        "head": jax.random.normal(keys[1], (WIDTH, WIDTH), F64) / 2,
    }


def _run(programs, weights, x):
    results = {program.__name__: program(weights[program.__name__], x) for program in programs}
    return sum(y for y, _ in results.values()), {name: number for name, (_, number) in results.items()}


class Net(nnx.Module):
    def __init__(self, programs):
        self.programs = programs
        self.weights = nnx.Dict(
            {
                program.__name__: nnx.Dict({name: nnx.Param(w) for name, w in _weights(program).items()})
                for program in programs
            }
        )
        self.last = nnx.Linear(WIDTH, 1, param_dtype=F64, rngs=nnx.Rngs(0))

    def __call__(self, x):
        weights = {of: {name: w[...] for name, w in own.items()} for of, own in self.weights.items()}
        y, numbers = _run(self.programs, weights, x)
        return self.last(y), numbers


class LinenNet(linen.Module):
    programs: tuple

    @linen.compact
    def __call__(self, x):
        weights = {
            program.__name__: {
                name: self.param(f"{program.__name__}_{name}", lambda key, w=w: w)
                for name, w in _weights(program).items()
            }
            for program in self.programs
        }
        y, numbers = _run(self.programs, weights, x)
        return linen.Dense(1, param_dtype=F64, name="last")(y), numbers


def loss(model, batch):
    """Reads every result; some metrics are numbers, one is a constant, one an input."""
    y, numbers = model(batch["x"])
    total = jnp.mean((y - batch["y"]) ** 2) + sum(numbers.values())
    return total, {**numbers, "constant": 2.0, "scale": batch["scale"]}


def batch(n):
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(n, WIDTH)), "y": rng.normal(size=(n, 1)), "scale": np.float64(1.5)}
