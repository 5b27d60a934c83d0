"""The edge of JAX: every canary is well on this JAX, and fails when what it watches is broken under it."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import types

import flax.core
import jax
import jax.ad_checkpoint
import jax.extend.core
import jax.numpy as jnp
import pytest
from flax import nnx
from jax._src import compiler, core, xla_bridge
from jax._src.lax import parallel
from jax._src.lib import _jax
from jax.experimental.pallas import triton as pallas_triton
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

import axonml_jax as ax
from axonml_jax.compat import canaries as typed
from axonml_jax.compat import canaries as waits
from axonml_jax.compat import jaxpr, row_keys, varying_types, versions
from axonml_jax.compat import order as around
from axonml_jax.compat import order as random_bits
from axonml_jax.compat import order as reductions
from axonml_jax.compat.canaries import CANARIES, Canary, CanaryError, expect
from axonml_jax.compat.order import SaveWhere, after, together
from axonml_jax.model.view import functionalize
from axonml_jax.parallel.placement import bind_plan
from axonml_jax.parallel.units import transform_of

BY_NAME = {canary.name: canary for canary in CANARIES}
PSUM, SCAN, VJP, CHECKPOINT, JIT = jax.lax.psum, jax.lax.scan, jax.vjp, jax.checkpoint, jax.jit
PERMUTE, SHARD_MAP, GATHER, CAST = jax.lax.ppermute, jax.shard_map, jax.lax.all_gather, jax.lax.pcast


def without_types(x):
    aval = core.typeof(x)
    return core.ShapedArray(aval.shape, aval.dtype)


def copying_vjp(fun, *args, **options):
    out, pull, *aux = VJP(fun, *args, **options)
    return out, jax.tree.map(jnp.copy, pull), *aux


def closing_vjp(fun, *args, **options):
    out, pull, *aux = VJP(fun, *args, **options)
    return out, jax.tree_util.Partial(lambda ct: pull(ct)), *aux


def nameless_checkpoint(fun, *, policy=None):
    return CHECKPOINT(fun, policy=policy and (lambda prim, *avals, **params: policy(prim)))


def other_loop(body, init, xs, length=None):
    return jax.lax.fori_loop(0, 2, lambda _, carry: body(carry, jnp.float32(1))[0], init), None


def refusing_loop(*args, **options):
    raise TypeError("types differ")


def reversed_permute(x, axes, perm):
    return PERMUTE(x, axes, [(5 - a, 5 - b) for a, b in perm])


def summed_gather(x, axis, *, tiled):
    part = jnp.zeros((2, *x.shape), x.dtype)
    return PSUM(jax.lax.dynamic_update_index_in_dim(part, x, jax.lax.axis_index(axis), 0), axis).reshape(-1)


class OtherClient:
    """A coordinator's client that forgets."""

    def __init__(self, *args, **options):
        self.held = {}

    def __getattr__(self, name):
        return lambda *args, **options: None


def unwritten(cache_key, compile_time_secs, module_name, backend, executable, host_callbacks=()):
    pass


NO_MESH = types.SimpleNamespace(manual_axes=(), empty=True, axis_names=())

# For every canary: how to break under it what it watches.
BREAKS = {
    "varying types are told": [(jax, "typeof", without_types)],
    "without check_vma nothing varies": [
        (jax, "shard_map", lambda f, check_vma, **kw: SHARD_MAP(f, check_vma=True, **kw))
    ],
    "casts to varying": [(jax.lax, "pcast", lambda x, axes, to: CAST(jax.lax.stop_gradient(x), axes, to=to))],
    "manual axes": [(jax.sharding, "get_abstract_mesh", lambda: NO_MESH)],
    "barriers are lowered": [(jax.lax, "optimization_barrier", lambda x: x)],
    "types behind a barrier": [(versions, "BARRIERS_JOIN_TYPES", not versions.BARRIERS_JOIN_TYPES)],
    "barriers are compiled": [(jax.lax, "optimization_barrier", lambda x: x)],
    "waiting is compiled": [(waits, "waiting", lambda value, others: value)],
    "residuals are the arguments": [(jax, "vjp", copying_vjp)],
    "a vjp is a pytree": [(jax, "vjp", closing_vjp)],
    "policies are asked about everything": [],  # `jax_remat3`, below
    "what policies are told": [(jax, "checkpoint", nameless_checkpoint)],
    "policies are obeyed": [(jax, "checkpoint", lambda fun, policy: fun)],
    "programs inside equations": [(jax, "jit", lambda fun: fun)],
    "parts of a scan": [(jax.lax, "scan", other_loop)],
    "equations bound again": [(jax.extend.core.Primitive, "get_bind_params", lambda self, params: {})],
    "literals": [(jaxpr, "Literal", type("Literal", (), {}))],
    "where equations come from": [(jax, "named_scope", lambda name: contextlib.nullcontext())],
    "dead code": [(jaxpr, "dce_jaxpr", lambda program, used, instantiate: (program, used))],
    "effects": [(core, "NamedAxisEffect", type("AxisEffect", (core.NamedAxisEffect,), {}))],
    "printed programs": [(jax, "make_jaxpr", lambda fun, **options: lambda *args: "{ lambda ; ... }")],
    "names of collectives": [(jax.lax, "psum", lambda x, axis: jnp.sum(GATHER(x, axis), 0))],
    "the gradient of a gather": [(jax.lax, "all_gather", summed_gather)],
    "positions over two axes": [(jax.lax, "ppermute", reversed_permute)],
    "lowered collectives": [(jax.lax, "psum", lambda x, axis: x)],
    "words of a refused loop": [(jax.lax, "scan", refusing_loop)],
    "reductions beside the partitioner": [(reductions, "_REDUCING", frozenset())],
    "traces are told apart": [(around, "get_opaque_trace_state", lambda: 0)],
    "settings are told apart": [(around, "trace_context", lambda: 0)],
    "the platform around": [(jax.sharding, "get_abstract_mesh", lambda: types.SimpleNamespace(empty=True))],
    "words of a refused placement": [(around, "_REFUSALS", re.compile("in other words"))],
    "a mesh of one device": [(around, "under_mesh", lambda mesh: contextlib.nullcontext())],
    "donated buffers": [(jax, "jit", lambda fun, donate_argnums: JIT(fun))],
    "branches write in place": [(versions, "BRANCHES_WRITE_IN_PLACE", not versions.BRANCHES_WRITE_IN_PLACE)],
    "host memory": [(jax, "device_put", lambda x, where: x)],
    "the coordinator's store": [(_jax, "get_distributed_runtime_client", OtherClient)],
    "where gloo listens": [(xla_bridge, "make_cpu_client", lambda: None)],
    "compiled programs of all processes": [(compiler, "_cache_write", unwritten)],
    "whether a backend has started": [(xla_bridge, "backends_are_initialized", lambda: False)],
    "threads of simulated devices": [(os, "environ", {**os.environ, "NPROC": "9999"})],
    "elements are drawn alone": [(random_bits, "threefry_2x32", lambda key, counts: counts)],
    "rows are drawn alone": [(row_keys, "_joined", lambda words, dtype: words[0].astype(dtype))],
    "streams of Linen modules": [(flax.core.Scope, "make_rng", lambda self, name="params": jax.random.key(0))],
    "splash attention in pieces": [
        (splash_attention_kernel, "_apply_mask_and_soft_cap", lambda scores, *_, **options: scores)
    ],
    "kernels in Triton": [(pallas_triton, "load", lambda at, **options: jax.numpy.zeros(8))],
}


@pytest.mark.parametrize("name", BY_NAME)
def test_every_canary_is_well(name):
    BY_NAME[name].check()


def test_every_canary_has_something_that_breaks_it():
    assert list(BREAKS) == list(BY_NAME)


@pytest.mark.parametrize("name", BY_NAME)
def test_every_canary_fails_when_what_it_watches_is_broken(name, monkeypatch):
    for owner, attribute, broken in BREAKS[name]:
        monkeypatch.setattr(owner, attribute, broken)
    jax.clear_caches()  # what was traced before must not hide it
    with jax_remat3(name == "policies are asked about everything"), pytest.raises(CanaryError) as caught:
        BY_NAME[name].check()
    monkeypatch.undo()
    jax.clear_caches()
    assert caught.value.found and caught.value.found in str(caught.value)
    assert BY_NAME[name].otherwise in str(caught.value)


@contextlib.contextmanager
def jax_remat3(on):
    """JAX's own way of breaking callable policies: its next `jax.checkpoint`."""
    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", on or before)
    try:
        yield
    finally:
        jax.config.update("jax_remat3", before)


def test_what_a_canary_says_names_the_remedy():
    canary = Canary("a name", "What we rely on.", "What goes wrong.", lambda: expect(False, "something else"))
    with pytest.raises(
        CanaryError,
        match=r"a name: something else\..*What we rely on\. Otherwise: What goes wrong\..*axonml_jax\.compat",
    ):
        canary.check()


def command(**environment):
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "JAX_", "NPROC"))}
    return subprocess.run(
        [sys.executable, "-m", "axonml_jax.compat"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=inherited | environment,
    )


def test_the_command_tries_everything():
    done = command()
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines[1:-1]] == list(BY_NAME)
    assert {line.split()[-1] for line in lines[1:-1]} == {"ok"}
    assert lines[0].startswith(f"jax {jax.__version__}, jaxlib ") and "supported: " in lines[0] and "jax<" in lines[0]
    assert lines[-1] == f"all {len(CANARIES)} are well"


def test_the_command_says_what_fails_and_what_would_go_wrong():
    done = command(JAX_REMAT3="1")
    assert done.returncode == 1, done.stdout + done.stderr
    canary = BY_NAME["policies are asked about everything"]
    assert f"{canary.name}  FAILED: jax.checkpoint asks its policy about" in done.stdout
    assert canary.otherwise in done.stdout and canary.relies in done.stdout
    assert f"of {len(CANARIES)} failed" in done.stdout.splitlines()[-1]


def linear():
    return nnx.Linear(4, 4, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_plan_is_not_bound_where_types_are_told_in_another_way(check_vma, monkeypatch):
    typed._once.cache_clear()
    name = "varying types are told" if check_vma else "without check_vma nothing varies"
    for owner, attribute, broken in BREAKS[name]:
        monkeypatch.setattr(owner, attribute, broken)
    plan, mesh, (_, variables) = ax.Plan(check_vma=check_vma), ax.make_mesh(data=8), functionalize(linear)
    with pytest.raises(CanaryError, match=name):
        bind_plan(plan, variables, mesh)
    monkeypatch.undo()
    bind_plan(plan, variables, mesh)


def test_a_plan_is_bound_where_a_mesh_surrounds_the_code():
    typed._once.cache_clear()
    mesh, (_, variables) = ax.make_mesh(data=8), functionalize(linear)
    with jax.set_mesh(mesh):
        bind_plan(ax.Plan(), variables, mesh)


BESIDE_THE_PARTITIONER = """
import sys
import jax, jax.numpy as jnp
jax.config.update("jax_num_cpu_devices", 4)
if sys.argv[1] == "own":
    from axonml_jax.collectives import primitives
mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
spec = jax.sharding.PartitionSpec("data")
total = jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"data"})
print(jax.jit(total)(jnp.arange(8.0, dtype=jnp.bfloat16)).tolist())
"""


def beside_the_partitioner(rule):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "NPROC"))}
    return subprocess.run(
        [sys.executable, "-c", BESIDE_THE_PARTITIONER, rule],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment | {"JAX_PLATFORMS": "cpu"},
    )


def test_bfloat16_is_summed_beside_an_axis_that_xla_partitions():
    """A user's own sum, in a process of its own: without our rule XLA ends it."""
    done = beside_the_partitioner("own")
    assert done.stdout == "[4.0, 6.0, 8.0, 10.0, 4.0, 6.0, 8.0, 10.0]\n", done.stderr


@pytest.mark.slow
def test_jaxs_own_rule_still_ends_the_process():
    done = beside_the_partitioner("jax's")
    assert done.returncode == -signal.SIGABRT, "XLA compiles it now: compat/order.py is no longer needed"
    assert "Invalid binary instruction opcode copy" in done.stderr


def test_a_sum_over_no_axis_is_lowered_as_its_operand():
    """`vmap` leaves such sums behind; recomputed, their operand is a function's argument, which no operation made."""
    empty = {"axes": (), "axis_index_groups": None}
    for fun in (lambda x: parallel.psum_p.bind(x, **empty), lambda x: parallel.pmax_p.bind(jnp.sin(x), **empty)):
        assert jax.jit(fun)(jnp.ones(2)).shape == (2,)


def test_policies_of_one_function_are_equal_and_save_what_it_says():
    by_name = lambda result: result.given_name == "kept"
    products = lambda result: result.primitive == "dot_general" and result.operands[0].shape == (8, 5)
    assert SaveWhere(products) == SaveWhere(products) != SaveWhere(by_name) and hash(SaveWhere(products))

    def residuals(policy):
        fun = lambda x, w: jnp.sum(jnp.sin(jax.ad_checkpoint.checkpoint_name((x @ w)[:, :1], "kept")))
        _, pull = jax.vjp(jax.checkpoint(fun, policy=policy), jnp.ones((8, 5)), jnp.ones((5, 32)))
        return sorted(leaf.shape for leaf in jax.tree.leaves(pull))

    assert residuals(SaveWhere(products)) == [(5, 32), (8, 5), (8, 32)]
    assert residuals(SaveWhere(by_name)) == [(5, 32), (8, 1), (8, 5)]


def test_barriers_order_without_changing_values():
    x, y = jnp.arange(3.0), {"a": jnp.ones(2)}
    assert jax.tree.all(jax.tree.map(jnp.array_equal, together((x, y)), (x, y)))
    assert jnp.array_equal(after(x, y), x)


def test_what_says_no_type_varies_over_nothing():
    assert varying_types.varying_axes(1.0) == frozenset() == varying_types.varying_axes(core.abstract_token)


def test_what_a_policy_must_be_asked_about_is_refused_where_it_is_not():
    with jax_remat3(True), pytest.raises(ValueError, match=r"jax_remat3 is on.*Set JAX_REMAT3=0"):
        transform_of(None, apart=True)
    with jax_remat3(True):
        assert transform_of("selective", apart=True) and transform_of(None)
