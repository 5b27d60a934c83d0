"""What a schedule moves, times the trips of its loops, what of it runs behind products, and the peak: as XLA:TPU prints it."""

from types import SimpleNamespace

import pytest

from axonml_jax.ledger.compiled import device_peak, moved

HLO = """HloModule jit_step, is_scheduled=true

%starts (p: bf16[128,64]) -> (bf16[128,64], bf16[1024,64]) {
  %p = bf16[128,64]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %all-gather.1 = bf16[1024,64]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=1, replica_groups=mesh['data'=2,'fsdp'=8] {'fsdp'}, dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %custom-call = (bf16[128,64]{1,0}, bf16[1024,64]{1,0}) custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%carries (p: bf16[128,64], x: f32[16,128]) -> f32[16,64] {
  %p = bf16[128,64]{1,0} parameter(0)
  %x = f32[16,128]{1,0} parameter(1)
  %all-gather.2 = bf16[1024,64]{1,0} all-gather(%p), channel_id=1, replica_groups=mesh['data'=2,'fsdp'=8] {'fsdp'}, dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %convolution = f32[16,64]{1,0} convolution(%x, %p), dim_labels=bf_io->bf
}

%ends (p: bf16[1024,64]) -> bf16[1024,64] {
  ROOT %all-gather.3 = bf16[1024,64]{1,0} all-gather(%p), channel_id=1, replica_groups=mesh['data'=2,'fsdp'=8] {'fsdp'}, frontend_attributes={chain_id="0"}
}

%all-reduce-scatter.1 (g: f32[1024,64]) -> f32[128,64] {
  %g = f32[1024,64]{1,0} parameter(0)
  %all-reduce.9 = f32[1024,64]{1,0} all-reduce(%g), replica_groups={{0,1,2,3,4,5,6,7},{8,9,10,11,12,13,14,15}}, to_apply=%add
  ROOT %dynamic-slice = f32[128,64]{1,0} dynamic-slice(%all-reduce.9)
}

%body (s: (f32[16,64])) -> (f32[16,64]) {
  %s = (f32[16,64]{1,0}) parameter(0)
  %async-collective-start.4 = (bf16[128,64]{1,0}, /*index=1*/bf16[1024,64]{1,0}) fusion(%w), kind=kCustom, calls=%starts
  %fusion.7 = f32[16,64]{1,0} fusion(%w, %x), kind=kOutput, calls=%carries
  %async-collective-done.4 = bf16[1024,64]{1,0} fusion(%get-tuple-element.1), kind=kCustom, calls=%ends
  %all-gather.8 = bf16[1024,64]{1,0} all-gather(%w), replica_groups=[2,8]<=[16], dimensions={0}
  %fusion.9 = f32[128,64]{1,0} fusion(%g), kind=kCustom, calls=%all-reduce-scatter.1
  ROOT %tuple = (f32[16,64]{1,0}) tuple(%fusion.7)
}

%condition (s: (f32[16,64])) -> pred[] {
  %bound = s32[]{:T(128)} constant(3)
  ROOT %less = pred[]{:T(512)} compare(%i, %bound), direction=LT
}

ENTRY %main (p: f32[16,64]) -> f32[16,64] {
  %while.1 = (f32[16,64]{1,0}) while(%tuple.1), condition=%condition, body=%body
  %all-reduce-start.1 = f32[64]{0} all-reduce-start(%v), replica_groups=mesh['data'=2,'fsdp'=8] {'data','fsdp'}, to_apply=%add
  %add.1 = f32[16,64]{1,0} add(%a, %b)
  %all-reduce-done.1 = f32[64]{0} all-reduce-done(%all-reduce-start.1)
  %all-reduce-start.2 = f32[64]{0} all-reduce-start(%v), replica_groups=mesh['data'=2,'fsdp'=8] {'data'}, to_apply=%add
  %dot.1 = f32[16,64]{1,0} dot(%a, %b)
  %all-reduce-done.2 = f32[64]{0} all-reduce-done(%all-reduce-start.2)
  ROOT %result = f32[16,64]{1,0} add(%add.1, %dot.1)
}
"""  # noqa: E501


def test_bytes_are_counted_once_per_trip_and_hidden_behind_products_only():
    found = moved(HLO)
    gather = 1024 * 64 * 2 * 7 // 8
    assert (found["all_gather"].count, found["all_gather"].size, found["all_gather"].share) == (6, 6 * gather, 0.5)
    scatter = found["reduce_scatter"]
    assert (scatter.count, scatter.size, scatter.hidden) == (3, 3 * 1024 * 64 * 4 * 7 / 8, 0)
    sums = found["all_reduce"]
    assert (sums.count, sums.size, sums.hidden) == (2, 2 * 256 * 15 / 16 + 256, 256)
    assert found["all"].size == found["all_gather"].size + scatter.size + sums.size
    assert "6 executions" in str(found["all_gather"]) and "50% behind compute" in str(found["all_gather"])
    assert set(moved(HLO, ["all_gather"])) == {"all_gather", "all"}
    said = HLO.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"5"}}')
    assert moved(said)["all_gather"].count == 10
    with pytest.raises(ValueError, match="no ENTRY computation"):
        moved("module @step {}")


HOST = ("host_argument_size_in_bytes", "host_output_size_in_bytes", "host_alias_size_in_bytes")
OWN = ("argument_size_in_bytes", "output_size_in_bytes", "alias_size_in_bytes", "temp_size_in_bytes")
PLANNED = (*OWN, *HOST, "peak_memory_in_bytes")


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ((3, 2, 2, 40, 0, 0, 0, 41), 41),  # not all temporaries are there at once
        ((3, 2, 1, 40, 5, 5, 5, 45), 40),  # what rests on the host is counted in
        ((12, 12, 12, 31, 0, 0, 0, 57), 43),  # the host's 45 of temporaries, which are more than the device's
    ],
)
def test_a_devices_peak_leaves_out_what_the_host_has(sizes, wanted):
    planned = SimpleNamespace(**dict(zip(PLANNED, sizes, strict=True)))
    assert device_peak(SimpleNamespace(memory_analysis=lambda: planned)) == wanted
