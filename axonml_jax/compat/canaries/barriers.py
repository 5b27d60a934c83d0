"""Canaries about `barrier.py`: without barriers results stay right, and memory and overlap are lost."""

from typing import Any

import jax
import jax.numpy as jnp

from axonml_jax.compat import versions
from axonml_jax.compat.barrier import after, together
from axonml_jax.compat.canaries.canary import Canary, expect
from axonml_jax.compat.canaries.on_two import AXIS, SPLIT, WHOLE, floats, on_two
from axonml_jax.compat.stablehlo import parsed
from axonml_jax.compat.varying_types import varying_axes


def _lowered() -> None:
    text = jax.jit(lambda x, y: after(jnp.sin(x), jnp.cos(y))).lower(floats(2), floats(3)).as_text()
    module = parsed(text)  # alive while it is read
    main = next(op.operation for op in module.body if op.operation.name == "func.func")
    found = {op.operation.name: op.operation for op in main.regions[0].blocks[0]}
    barrier = found.get("stablehlo.optimization_barrier")
    if barrier is None:
        expect(False, f"no barrier is left in the lowered program: {list(found)}")
    else:
        tied = [str(value.owner.name) for value in barrier.operands]
        expect(
            tied == ["stablehlo.sine", "stablehlo.cosine"],
            f"a value that waits for another one, which nothing else reads, is tied to {tied}",
        )


def _typed() -> None:
    seen: dict[str, frozenset[str]] = {}

    def look(x: Any, w: Any) -> Any:
        x, w = together((x, w))
        seen["what varied"], seen["what did not"] = varying_axes(x), varying_axes(w)
        return x

    jax.make_jaxpr(on_two(look, SPLIT, WHOLE, check_vma=True))(floats(2), floats(1))
    wanted = {"what varied": {AXIS}, "what did not": {AXIS} if versions.BARRIERS_JOIN_TYPES else set()}
    expect(seen == wanted, f"behind a barrier these vary: {seen}, expected {wanted}")


def _compiled() -> None:
    def twice(x: Any, y: Any) -> Any:
        first = jnp.tanh(x @ x)
        again, y = together((x, first @ y))
        return jnp.tanh(again @ again) @ y

    options = versions.CPU_BARRIER_OPTIONS
    text = jax.jit(twice, compiler_options=options).lower(floats(64, 64), floats(64, 64)).compile().as_text()
    count = sum(" tanh(" in line for line in str(text).splitlines())
    expect(count == 2, f"the same is computed before and behind a barrier: the compiled program does it {count} times")


CANARIES = (
    Canary(
        "barriers are lowered",
        "optimization_barrier reaches StableHLO with every operand, those too whose results nobody reads.",
        "Weights are gathered, and offloaded arrays loaded, all at once at the start of a step: ZeRO-3's memory is lost.",
        _lowered,
    ),
    Canary(
        "types behind a barrier",
        "Before jax 0.11 a barrier types its results as varying over what any operand varies over; later it changes no type.",
        "Reduced gradients are typed as varying, or one barrier ties what has to be tied apart.",
        _typed,
    ),
    Canary(
        "barriers are compiled",
        "XLA:CPU, with the options that versions.py gives it, does not merge equal operations across a barrier.",
        "A unit gathered again in the backward is merged with the forward's and kept: ZeRO-3's memory is lost.",
        _compiled,
    ),
)
