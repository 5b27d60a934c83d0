"""Counting from lowered and compiled programs, and holding the trace against them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from ledger_steps import BOTH, CASES, KINDS, SWAP, abstract_mesh, ddp_step, floats, on_mesh, zero3_step

from axonml_jax.ledger.compiled import Difference, agreement, collectives_in_compiled, collectives_in_lowered, moved
from axonml_jax.ledger.count import collectives_in


def both(step, *args):
    platform = ("cpu",)
    return collectives_in(step, *args), collectives_in_lowered(step.trace(*args).lower(lowering_platforms=platform))


@pytest.mark.parametrize(("name", "check_vma"), [case for case in CASES if case[0] != "pbroadcast"])
def test_every_call_agrees_with_stablehlo(name, check_vma):
    case = KINDS[name]
    rows = 48 if name == "psum unequal groups" else 64
    step = on_mesh(case.call, out_specs=case.out_specs, check_vma=check_vma)
    traced, lowered = both(step, floats(rows, 8))
    assert agreement(traced, lowered) == []
    assert (len(lowered), lowered[0].op) == (1, case.op)


def test_a_broadcast_agrees_where_it_can_be_lowered():
    step = on_mesh(KINDS["pbroadcast"].call)
    lowered = step.trace(floats(64, 8)).lower(lowering_platforms=("cuda",))
    assert agreement(collectives_in(step, floats(64, 8)), collectives_in_lowered(lowered)) == []


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint32", "bfloat16", "float16", "complex64", "float8_e4m3fn"])
def test_dtypes_have_the_same_name_on_both_sides(dtype):
    traced, lowered = both(on_mesh(lambda x: lax.ppermute(x, "data", SWAP)), floats(64, 8, dtype=dtype))
    assert agreement(traced, lowered) == []
    assert (traced[0].dtype, traced[0].itemsize) == (dtype, lowered[0].itemsize)


@pytest.mark.parametrize("length", [0, 1, 4, 7])
@pytest.mark.parametrize("inner_unroll", [1, 2])
@pytest.mark.parametrize("unroll", [0, 1, 2, 3, 4, 7, 9, True])
def test_scans_agree_whatever_their_unrolling(length, unroll, inner_unroll):
    def body(x):
        def hop(carry, _):
            return lax.ppermute(jnp.tanh(carry), "data", SWAP), None

        def trip(carry, _):
            inner, _ = lax.scan(hop, carry, None, length=2, unroll=inner_unroll)
            return lax.psum(inner, "tensor"), None

        return lax.scan(trip, x, None, length=length, unroll=unroll)[0]

    traced, lowered = both(on_mesh(body), floats(64, 8))
    assert agreement(traced, lowered) == []


def test_branches_loops_and_shared_functions_agree():
    shared = jax.jit(lambda a: lax.psum(a, "data"))

    def body(x):
        x = shared(shared(x) * 2)
        x = lax.cond(x[0, 0] > 0, lambda c: lax.all_gather(c, BOTH)[0], lambda c: shared(c), x)
        return lax.while_loop(lambda c: lax.pmax(c[0, 0], "data") < 3, jax.checkpoint(shared), x)

    traced, lowered = both(on_mesh(body), floats(64, 8))
    assert agreement(traced, lowered) == []
    assert [entry.in_loop for entry in lowered] == [False] * 4 + [True] * 2
    assert [entry.where for entry in lowered][2:4] == [entry.where for entry in traced][2:4]


@pytest.mark.parametrize("check_vma", [False, True])
def test_training_steps_agree(check_vma):
    params = {"w": floats(5, 7), "b": floats(7)}
    traced, lowered = both(ddp_step(abstract_mesh(data=8), check_vma=check_vma), params, floats(16, 5))
    assert agreement(traced, lowered) == []
    assert (len(traced), len(lowered)) == (2, 3)
    step = zero3_step(abstract_mesh(fsdp=4), layers=3, check_vma=check_vma)
    assert agreement(*both(step, floats(3, 8, 8), floats(4, 8))) == []


def test_partly_and_nested_manual_meshes_agree():
    partly = {"axis_names": {"data"}, "in_specs": P("data"), "out_specs": P(), "check_vma": True}
    assert agreement(*both(on_mesh(lambda x: lax.psum(x, "data"), **partly), floats(64, 8))) == []

    def nested(x):
        inner = lambda y: lax.psum(lax.psum(y, "tensor"), "data")
        mesh = jax.sharding.get_abstract_mesh()
        return jax.shard_map(inner, mesh=mesh, axis_names={"tensor"}, in_specs=P("tensor"), out_specs=P())(x)

    traced, lowered = both(on_mesh(nested, **partly), floats(64, 8))
    assert agreement(traced, lowered) == []
    assert [(entry.axes, entry.elements, entry.automatic) for entry in traced] == [
        (("tensor",), 64, ()),
        (("data",), 64, ()),
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "bfloat16"},
        {"leaf_elements": (63,)},
        {"leaf_elements": (64, 64)},
        {"group_size": 4},
        {"kind": "permute"},
    ],
)
def test_a_wrong_count_is_a_difference(change):
    traced, lowered = both(on_mesh(lambda x: lax.psum(x, "data")), floats(64, 8))
    assert agreement([replace(traced[0], **change)], lowered)


def test_a_difference_says_what_and_where():
    traced, lowered = both(on_mesh(lambda x: lax.psum(x, "data")), floats(64, 8))
    (difference,) = agreement([], lowered)
    assert difference == Difference("all_reduce", "float32", 64, 2, False, traced=0, lowered=1)
    assert str(difference) == "all_reduce of float32[64] over 2 ranks, outside loops: traced 0, lowered 1"
    assert len(agreement(traced * 2, lowered)) == 1


def compiled_step():
    """An all-reduce before a loop of five, a gather or a permute after it, compiled for eight devices."""
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices: set XLA_FLAGS=--xla_force_host_platform_device_count=8")
    mesh = jax.make_mesh((2, 4), BOTH, axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:8])

    def body(x):
        x = lax.psum(x, "data")
        x, _ = lax.scan(lambda c, _: (lax.psum(jnp.tanh(c), "tensor"), None), x, None, length=5)
        gathered = lambda c: lax.all_gather(c, "data")[1]
        return lax.cond(x[0, 0] > 0, gathered, lambda c: lax.ppermute(c, "data", SWAP), x)

    return on_mesh(body, mesh=mesh, in_specs=P("data"), out_specs=P("data")).lower(floats(4, 8)).compile()


def test_placement_is_read_from_the_compiled_program():
    found = {(entry.kind, entry.in_loop) for entry in collectives_in_compiled(compiled_step())}
    assert found == {("all_reduce", False), ("all_reduce", True), ("permute", False), ("all_gather", False)}


HLO = """HloModule step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %x = f32[8]{0} get-tuple-element((s32[], /*index=1*/f32[8]) %p), index=1
  %start = (f32[8]{0}, f32[16]{0}) all-gather-start(%x), replica_groups={{0,1}}, dimensions={0}
  ROOT %done = (s32[], f32[8]) all-gather-done(%start)
}

ENTRY %main.4_spmd (x: f32[8]) -> f32[8] {
  %loop = (s32[], f32[8]{0}) while((s32[], f32[8]) %t), condition=%cond, body=%body
  %fused = f32[4]{0} fusion(%loop), kind=kCustom, calls=%scatter
  ROOT %r = f32[8]{0} all-reduce(%y), replica_groups={{0,1}}, to_apply=%add
}

%scatter (q: f32[8]) -> f32[4] {
  ROOT %rs = f32[4]{0} reduce-scatter(%q), dimensions={0}, to_apply=%add
}
"""


def test_asynchronous_and_fused_collectives_are_read():
    found = [(entry.kind, entry.in_loop, entry.asynchronous) for entry in collectives_in_compiled(HLO)]
    assert found == [("all_gather", True, True), ("reduce_scatter", False, False), ("all_reduce", False, False)]
    results = [entry.result for entry in collectives_in_compiled(HLO)]
    assert results == ["f32[16]{0}", "f32[4]{0}", "f32[8]{0}"]  # without the operand of the start


def test_stablehlo_is_no_compiled_program():
    text = on_mesh(lambda x: lax.psum(x, "data")).trace(floats(64, 8)).lower(lowering_platforms=("cpu",)).as_text()
    with pytest.raises(ValueError, match="not StableHLO"):
        collectives_in_compiled(text)


SLICES = """\
HloModule step, is_scheduled=true

ENTRY %main (g: f32[6,128], w: f32[8,8]) -> f32[6,128] {
  %g = f32[6,128]{1,0} parameter(0)
  %w = f32[8,8]{1,0} parameter(1)
  %token = token[] after-all()
  %recv = (f32[6,128]{1,0}, u32[], token[]) recv(%token), channel_id=1, is_host_transfer=true, ATTRIBUTES
  %send = (f32[6,128]{1,0}, u32[], token[]) send(%g, %token), channel_id=2, is_host_transfer=true, ATTRIBUTES
  %product = f32[8,8]{1,0} dot(%w, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %sent = token[] send-done(%send), channel_id=2, is_host_transfer=true
  %received = (f32[6,128]{1,0}, token[]) recv-done(%recv), channel_id=1, is_host_transfer=true
  ROOT %sum = f32[6,128]{1,0} get-tuple-element(%received), index=0
}
""".replace(
    "ATTRIBUTES",
    'frontend_attributes={_xla_host_transfer_rendezvous="psum.1_0",_xla_megascale_target="{1,2,4:5}x{0:7}",'
    '_xla_megascale_transfer_type="ALL_REDUCE"}',
)


def test_what_goes_over_the_network_between_slices_is_a_collective_of_the_slices():
    [found] = collectives_in_compiled(SLICES)
    assert (found.kind, found.asynchronous, found.result) == ("all_reduce between slices", True, "f32[6,128]{1,0}")
    [_, across] = moved(SLICES).values()
    assert (across.kind, across.count) == ("all_reduce between slices", 1)
    assert across.size == across.hidden == 2 * 3 / 4 * 6 * 128 * 4  # a ring of four slices, behind the product
    assert "all_reduce" not in moved(SLICES)
