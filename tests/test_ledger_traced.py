"""Counting from a trace: every kind of call in both `check_vma` modes, loops, branches, trees; no devices."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from ledger_steps import BOTH, CASES, KINDS, MESH, SWAP, abstract_mesh, ddp_step, floats, on_mesh, zero3_step

from axonml_jax.ledger.count import Branch, Loop, collectives_in

MODES = pytest.mark.parametrize("check_vma", [False, True])


def entries_of(body, *args, **options):
    return collectives_in(on_mesh(body, **options), *(args or (floats(64, 8),)))


@pytest.mark.parametrize(("name", "check_vma"), CASES)
def test_every_call_is_counted_with_its_ring_bytes(name, check_vma):
    case = KINDS[name]
    rows = 48 if name == "psum unequal groups" else 64
    (entry,) = entries_of(case.call, floats(rows, 8), out_specs=case.out_specs, check_vma=check_vma)
    assert (entry.kind, entry.axes, entry.group_size, entry.op) == (case.kind, case.axes, case.group_size, case.op)
    assert (entry.elements, entry.leaves, entry.dtype, entry.itemsize) == (case.elements, 1, "float32", 4)
    assert entry.wire_bytes == case.wire_bytes
    assert (entry.count, entry.in_loop, entry.where) == (1, False, "once")


@MODES
def test_casts_and_axis_indices_are_silent(check_vma):
    def body(x):
        return x + lax.pcast(jnp.zeros(8), BOTH, to="varying") + lax.axis_index("data") + lax.psum(1, "data")

    assert entries_of(body, check_vma=check_vma) == ()


@MODES
def test_a_call_on_a_tree_is_one_entry_per_dtype(check_vma):
    def body(x):
        a, b, c = lax.psum((x, x[0], x[0].astype(jnp.int32)), "data")
        return a + b + c

    real, whole = entries_of(body, check_vma=check_vma)
    assert (real.leaf_elements, real.leaves, real.elements) == ((64, 8), 2, 72)
    assert (whole.dtype, whole.leaf_elements) == ("int32", (8,))


@MODES
def test_a_loop_over_leaves_is_one_call_whatever_casts_stand_between(check_vma):
    def body(x):
        varying = {"a": x, "b": x[0]}
        summed = jax.tree.map(lambda leaf: lax.psum(leaf, "data"), varying)
        typed = [lax.psum(lax.pcast(leaf, "data", to="varying"), "data") for leaf in summed.values()]
        return typed[0] + typed[1]

    assert [entry.leaf_elements for entry in entries_of(body, check_vma=check_vma)] == [(64, 8), (64, 8)]


@MODES
def test_neighbouring_calls_stay_apart(check_vma):
    def two_lines(x):
        row = x[0]
        a = lax.psum(x, "data")
        b = lax.psum(row, "data")
        return a + b

    def chain(x):
        for _ in range(3):
            x = lax.psum(x, "data")
        return x

    def buckets(x):
        leaves, sums = (x, x[0]), []
        for index, leaf in enumerate(leaves):
            with jax.named_scope(f"axonml.gradients/bucket{index}"):
                sums.append(lax.psum(leaf, "data"))
        return sums[0] + sums[1]

    assert [entry.elements for entry in entries_of(two_lines, check_vma=check_vma)] == [64, 8]
    assert [entry.elements for entry in entries_of(buckets, check_vma=check_vma)] == [64, 8]
    assert len(entries_of(chain)) == 3


@MODES
def test_loops_multiply_and_while_loops_are_marked(check_vma):
    def inner(carry, _):
        return lax.ppermute(jnp.tanh(carry), "data", SWAP), None

    def outer(carry, _):
        carry, _ = lax.scan(inner, carry, None, length=3)
        return lax.fori_loop(0, 5, lambda _, c: lax.ppermute(c, "tensor", SWAP), carry), None

    def body(x):
        x, _ = lax.scan(outer, x, None, length=2)
        return lax.while_loop(lambda c: lax.pmax(c[0, 0], BOTH) < 3, lambda c: lax.ppermute(c, "data", SWAP), x)

    scan, fori, condition, trip = entries_of(body, check_vma=check_vma)
    assert (scan.path, scan.count, scan.where) == ((Loop(2), Loop(3)), 6, "scan[2] > scan[3]")
    assert (fori.path, fori.count, fori.axes) == ((Loop(2), Loop(5)), 10, ("tensor",))
    assert (condition.kind, condition.unbounded, condition.count) == ("all_reduce", True, None)
    assert (trip.kind, trip.path, trip.executions) == ("permute", (Loop(),), 1)
    assert scan.step_wire_bytes == 6 * 256


@MODES
def test_only_the_heaviest_branch_is_counted(check_vma):
    def twice(x):
        return lax.ppermute(lax.ppermute(x, "data", SWAP), "data", SWAP)

    def body(x):
        branches = [lambda c: c, twice, lambda c: lax.ppermute(c, "data", SWAP)]
        return lax.switch(lax.axis_index("tensor"), branches, x)

    first, second, third = entries_of(body, check_vma=check_vma)
    assert [entry.counted for entry in (first, second, third)] == [True, True, False]
    assert (first.path, third.path) == ((Branch(1, 3),), (Branch(2, 3),))
    assert (first.where, third.where) == ("branch 2/3", "branch 3/3")


def test_a_nested_conditional_weighs_its_heaviest_branch_alone():
    def hops(number):
        def run(x):
            for _ in range(number):
                x = lax.ppermute(x, "data", SWAP)
            return x

        return run

    def body(x):
        nested = lambda c: lax.cond(c[0, 1] > 0, hops(2), hops(2), c)
        return lax.cond(x[0, 0] > 0, nested, hops(3), x)

    counted = [entry.path for entry in entries_of(body) if entry.counted]
    assert counted == [(Branch(0, 2),)] * 3


@MODES
def test_calls_are_found_in_jit_checkpoint_and_custom_derivatives(check_vma):
    @jax.custom_vjp
    def doubled(x):
        return lax.ppermute(x, "data", SWAP)

    doubled.defvjp(lambda x: (doubled(x), None), lambda _, ct: (lax.ppermute(ct, "tensor", SWAP),))

    @jax.custom_jvp
    def squared(x):
        return lax.ppermute(x, "data", SWAP)

    squared.defjvp(lambda primals, tangents: (squared(*primals), lax.ppermute(tangents[0], "data", SWAP)))
    wrappers = [jax.jit, jax.checkpoint, jax.vmap, lambda f: f]
    for wrap in wrappers:
        for f in (doubled, squared):
            assert len(entries_of(wrap(f), check_vma=check_vma)) == 1
    forward, backward = entries_of(lambda x: jax.vjp(doubled, x)[1](doubled(x))[0], check_vma=check_vma)
    assert (forward.axes, backward.axes) == (("data",), ("tensor",))


def test_results_nobody_uses_are_not_counted():
    def body(x):
        lax.psum(x, "data")
        y, _ = lax.scan(lambda c, _: (c + 1, lax.psum(c, "tensor")), x, None, length=3)
        return jax.jit(lambda a: (lax.psum(a, "data"), a))(y)[1]

    assert entries_of(body) == ()


@MODES
def test_labels_come_from_the_scopes_around_inner_jaxprs(check_vma):
    def body(x):
        with jax.named_scope("axonml.buffers"):
            x, _ = lax.scan(lambda c, _: (lax.ppermute(c, "data", SWAP), None), x, None, length=2)
            x = jax.jit(lambda a: lax.ppermute(a, "data", SWAP))(x)
        return x + lax.psum(jnp.sum(x), "data") + lax.ppermute(x, "data", SWAP)

    labels = [entry.label for entry in entries_of(body, check_vma=check_vma)]
    assert sorted(labels) == ["", "buffers", "buffers", "scalars"]


def test_padding_is_read_from_the_scope():
    def body(x):
        with jax.named_scope("axonml.gradients.pad16"):
            return lax.psum(x, "data")

    (entry,) = entries_of(body)
    assert (entry.label, entry.padding, entry.wire_bytes, entry.padding_wire_bytes) == ("gradients", 16, 256, 64)


def test_axes_left_to_the_partitioner_are_named():
    (entry,) = entries_of(
        lambda x: lax.psum(x, "data"), axis_names={"data"}, in_specs=P("data"), out_specs=P(), check_vma=True
    )
    assert (entry.axes, entry.automatic, entry.elements) == (("data",), ("tensor",), 256)


def test_random_keys_travel_as_words():
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 8))
    (entry,) = entries_of(lambda k: lax.all_gather(k, "data", tiled=True)[:1], keys)
    assert (entry.dtype, entry.elements) == ("uint32", 4)


@MODES
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ddp_sends_two_parameters_per_parameter(ranks, check_vma):
    params = {"w": floats(5, 7), "b": floats(7)}
    step = ddp_step(abstract_mesh(data=ranks), check_vma=check_vma)
    gradients, loss = collectives_in(step, params, floats(6 * ranks, 5))
    assert (gradients.label, gradients.leaves, gradients.count) == ("gradients", 2, 1)
    assert gradients.wire_bytes == Fraction(4 * 2 * 42 * (ranks - 1), ranks)
    assert (loss.label, loss.elements) == ("metrics", 1)


@MODES
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_zero3_sends_three_parameters_per_parameter(ranks, check_vma):
    layers = 6
    step = zero3_step(abstract_mesh(fsdp=ranks), layers=layers, check_vma=check_vma)
    entries = collectives_in(step, floats(layers, 8, 8), floats(ranks, 8))
    found = sorted((entry.kind, entry.label, entry.count) for entry in entries)
    gather = ("all_gather", "parameters", layers)
    assert found == [gather, gather, ("reduce_scatter", "gradients", layers)]
    assert sum(entry.step_wire_bytes for entry in entries) == Fraction(4 * 3 * layers * 64 * (ranks - 1), ranks)


def test_jaxprs_and_plain_functions_count_the_same():
    body = on_mesh(lambda x: lax.psum(x, "data"))
    x = floats(64, 8)
    expected = collectives_in(body, x)
    traced = body.trace(x)
    closed = jax.make_jaxpr(body)(x)
    for program in (traced.jaxpr, closed, closed.jaxpr):
        assert collectives_in(program) == expected
    assert collectives_in(lambda y: body(y), x) == expected
    assert len(expected) == 1


def test_a_body_alone_needs_its_axis_sizes():
    jaxpr = jax.make_jaxpr(lambda x: lax.psum(x, "data"), axis_env=[("data", 2)])(floats(4))
    assert collectives_in(jaxpr, axis_sizes={"data": 2})[0].group_size == 2
    with pytest.raises(ValueError, match=r"sizes of \['data'\] are unknown"):
        collectives_in(jaxpr)


def test_an_unknown_communicating_primitive_is_refused(monkeypatch):
    from axonml_jax.program import program as rules

    monkeypatch.delitem(rules.RULES, "pmax")
    with pytest.raises(ValueError, match="'pmax' names the mesh axes"):
        entries_of(lambda x: lax.pmax(x, "data"), mesh=MESH)
