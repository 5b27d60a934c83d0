"""Canaries about jaxprs and their equations, which the library reads, cuts and runs again."""

import functools
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params
from jax.interpreters import partial_eval

from axonml_jax.compat.canaries.on_two import AXIS, SPLIT, floats, names, on_two
from axonml_jax.compat.canary import Canary, expect


@jax.custom_jvp
def _with_jvp(x: Any) -> Any:
    return jnp.sin(x)


_with_jvp.defjvp(lambda primals, tangents: (_with_jvp(primals[0]), tangents[0]))


@jax.custom_vjp
def _with_vjp(x: Any) -> Any:
    return jnp.sin(x)


_with_vjp.defvjp(lambda x: (_with_vjp(x), x), lambda x, ct: (ct,))


def _program(x: Any) -> Any:
    with jax.named_scope("canary"):
        x = jnp.sin(x) + 1.0
    x = _with_vjp(_with_jvp(jax.jit(lambda x: x * 2)(x)))
    x = jax.checkpoint(jnp.cos)(x)
    total, _ = jax.lax.scan(lambda c, each: (c * each + x[0], None), jnp.float32(1), x)
    x = jax.lax.while_loop(lambda c: c[1] < 3, lambda c: (c[0] * total, c[1] + 1), (x, 0))[0]
    jnp.tan(x)
    return jax.lax.cond(total > 0, jnp.sin, jnp.cos, x)


def _traced() -> dict[str, Any]:
    """The equations of a program with one of each kind, by primitive."""
    return {eqn.primitive.name: eqn for eqn in jax.make_jaxpr(_program)(floats(4)).eqns}


_BODIES: dict[frozenset[str], tuple[str, ...]] = {
    frozenset({"jit", "pjit"}): ("jaxpr",),
    frozenset({"checkpoint", "remat2"}): ("jaxpr",),
    frozenset({"custom_jvp_call"}): ("call_jaxpr",),
    frozenset({"custom_vjp_call", "custom_vjp_call_jaxpr"}): ("call_jaxpr", "fun_jaxpr"),
    frozenset({"scan"}): ("jaxpr",),
    frozenset({"while"}): ("body_jaxpr",),
    frozenset({"cond"}): ("branches",),
}


def _inner() -> None:
    found = _traced()
    found |= {
        eqn.primitive.name: eqn for eqn in jax.make_jaxpr(on_two(jnp.sin, SPLIT, check_vma=False))(floats(2)).eqns
    }
    for known, keys in (_BODIES | {frozenset({"shard_map"}): ("jaxpr",)}).items():
        eqn = next((found[name] for name in known if name in found), None)
        if eqn is None:
            expect(False, f"no equation is called {' or '.join(sorted(known))}: {list(found)}")
            continue
        name, held = eqn.primitive.name, list(jaxprs_in_params(eqn.params))
        expect(any(key in eqn.params for key in keys), f"{name} holds its body in none of {keys}: {sorted(eqn.params)}")
        expect(
            len(held) == {"while": 2, "cond": 2}.get(name, 1), f"jaxprs_in_params finds {len(held)} programs in {name}"
        )
    sizes = found["shard_map"].params
    expect({"mesh", "newly_manual_axes"} <= set(sizes), f"shard_map says {sorted(sizes)}")


def _scans() -> None:
    params = _traced()["scan"].params
    if "ft_in" in params:  # jax 0.12
        consts, carry, _ = params["ft_in"].unpack()
        sizes = len(consts), len(carry)
    else:
        expect("num_consts" in params and "num_carry" in params, f"a scan says {sorted(params)}")
        sizes = params["num_consts"], params["num_carry"]
    expect(sizes == (1, 1), f"a scan with one constant and one carry says that it has {sizes}")
    missing = {"length", "reverse", "unroll", "jaxpr"} - set(params)
    expect(not missing, f"a scan does not say {sorted(missing)}")


def _bound_again() -> None:
    traced: Any = jax.make_jaxpr(_program)(floats(4))

    def run(x: Any) -> Any:
        values = dict(zip(traced.jaxpr.invars, [x], strict=True))
        for eqn in traced.eqns:
            params = eqn.primitive.get_bind_params(eqn.params)
            functions, params = params if isinstance(params, tuple) else ([], params)  # jax < 0.11
            read = [atom.val if isinstance(atom, jax.extend.core.Literal) else values[atom] for atom in eqn.invars]
            made = eqn.primitive.bind(*functions, *read, **params)
            values |= zip(eqn.outvars, made if eqn.primitive.multiple_results else [made], strict=True)
        return values[traced.jaxpr.outvars[0]]

    again = names(list(jax.make_jaxpr(run)(floats(4)).eqns))
    expect(
        again == names(list(traced.eqns)),
        f"equations that are bound again make {again}, not {names(list(traced.eqns))}",
    )


def _literals() -> None:
    atoms: list[Any] = [atom for eqn in jax.make_jaxpr(lambda x: x + 1.0)(floats(4)).eqns for atom in eqn.invars]
    found = [isinstance(atom, jax.extend.core.Literal) for atom in atoms]
    expect(found == [False, True], f"of x + 1.0 these operands are literals: {found}")
    expect(float(atoms[1].val) == 1.0 and atoms[1].aval.shape == (), f"the literal 1.0 reads {atoms[1]}")


def _sources() -> None:
    info = _traced()["sin"].source_info
    expect(
        str(info.name_stack) == "canary",
        f"an equation under named_scope('canary') stands under {str(info.name_stack)!r}",
    )
    frames = [] if info.traceback is None else [frame.function_name for frame in info.traceback.frames]
    expect("_program" in frames or any(name.endswith("._program") for name in frames), f"its traceback has {frames}")


def _dead_code() -> None:
    traced = jax.make_jaxpr(lambda x: (jnp.tan(x), jax.lax.optimization_barrier((x, jnp.sin(x)))[0])[1])(floats(4))
    live, used = partial_eval.dce_jaxpr(getattr(traced, "jaxpr", traced), [True], instantiate=True)
    left = names(list(live.eqns))
    expect(
        left == ["sin", "optimization_barrier"] and used == [True],
        f"without dead code are left {left}, of inputs {used}",
    )


def _effects() -> None:
    printing = jax.make_jaxpr(lambda x: jax.debug.print("{}", x) or x)(floats(1)).eqns[0]
    expect(bool(printing.effects), f"printing has the effects {list(printing.effects)}")
    body = (
        jax.make_jaxpr(on_two(lambda x: x + jax.lax.psum(x, AXIS), SPLIT, check_vma=False))(floats(2))
        .eqns[0]
        .params["jaxpr"]
    )
    sums = [eqn for eqn in body.eqns if eqn.primitive.name == "psum"]
    kinds = {type(effect).__name__ for eqn in sums for effect in eqn.effects}
    expect(kinds <= {"NamedAxisEffect"}, f"a sum over the ranks has the effects {sorted(kinds)}")


def _printed() -> None:
    def text(number: float) -> str:
        deep = lambda x: functools.reduce(lambda x, _: jnp.sin(x), range(200), x) * number
        return str(jax.make_jaxpr(lambda x: jax.lax.scan(lambda c, _: (deep(c), None), x, length=2)[0])(floats(1)))

    expect(text(2.0) == text(2.0), "the same program traced twice is printed in two ways")
    expect(text(2.0) != text(3.0), "programs that differ in a number inside a loop are printed alike")


CANARIES = (
    Canary(
        "programs inside equations",
        "Calls, loops and branches hold their bodies under the names we read.",
        "Units, stages and optimizers on shards do not see what a loop or a call does.",
        _inner,
    ),
    Canary(
        "parts of a scan",
        "A scan says how many of its operands are constants and how many are carried.",
        "Weights that a loop reads are taken for its carry: units and cuts go wrong.",
        _scans,
    ),
    Canary(
        "equations bound again",
        "get_bind_params gives what a primitive is bound with, so that an equation can be run again on other values.",
        "What runs under a plan is not what the model traced.",
        _bound_again,
    ),
    Canary(
        "literals",
        "A number written into a program is a Literal with a value.",
        "Numbers are taken for results of other equations, and looked for in vain.",
        _literals,
    ),
    Canary(
        "where equations come from",
        "An equation knows its name scopes and the functions that called it.",
        "Traffic loses its labels, messages name no line of the user's.",
        _sources,
    ),
    Canary(
        "dead code",
        "dce_jaxpr removes what no result needs, as lowering does, and leaves what a barrier waits for.",
        "The ledger counts collectives that are never sent, or misses some that are.",
        _dead_code,
    ),
    Canary(
        "effects",
        "Only what acts has an effect, besides NamedAxisEffect of collectives.",
        "Printing disappears from loops that are cut, or everything that communicates is kept from being cut.",
        _effects,
    ),
    Canary(
        "printed programs",
        "A traced program prints whole, and the same each time but for addresses.",
        "Processes that traced different programs are not found out, or equal ones are refused.",
        _printed,
    ),
)
