"""Published formulas give the published numbers: ZeRO's Table 1, DeepSpeed, Megatron, AxoNN."""

import math

import pytest

from axonml_jax.cost.decoder import wire_elements
from axonml_jax.cost.published import (
    FLOAT32_ADAM,
    GridDegrees,
    deepspeed,
    layer_volumes,
    megatron,
    zero,
)

# (parameters, ranks): GB under stages 1, 2 and 3, as printed; the 7.5B block is rounded, the others truncated.
TABLE_1 = {
    (7_500_000_000, 4): (52.5, 41.3, 30), (7_500_000_000, 64): (31.4, 16.6, 1.88),
    (128_000_000_000, 16): (608, 368, 128), (128_000_000_000, 64): (536, 284, 32),
    (10**12, 64): (4187, 2218, 250), (10**12, 1024): (4011, 2013, 15.6),
}  # fmt: skip


@pytest.mark.parametrize(("size", "printed"), TABLE_1.items(), ids=str)
def test_table_1_of_zero(size, printed):
    params, ranks = size
    for stage, figure in enumerate(printed, start=1):
        digits = len(str(figure).partition(".")[2])
        found = float(zero(params, ranks, stage)) / 1e9
        half_up = math.floor(found * 10**digits + 0.5) / 10**digits
        truncated = math.floor(found * 10**digits) / 10**digits
        assert (half_up if params == 7_500_000_000 else truncated) == figure, (stage, found)


def test_replicated_states_and_float32_states():
    assert zero(1000, 8, 0) == 16_000 and zero(1000, 8, 0, FLOAT32_ADAM) == 16_000
    assert [zero(800, 8, stage, FLOAT32_ADAM) for stage in (1, 2, 3)] == [7200, 4400, 1600]
    with pytest.raises(ValueError, match="stage 4 over 8 ranks"):
        zero(1, 8, 4)


def test_deepspeeds_estimators():
    model = {"params": 2_851_000_000, "ranks": 8}
    layer = {"largest_layer": 32_000_000}
    assert deepspeed(**model, stage=2) == 12_116_750_000
    assert deepspeed(**model, stage=2, offload="optimizer") == 5_702_000_000
    assert deepspeed(**model, stage=3, **layer) == 6_542_750_000
    assert deepspeed(**model, stage=3, **layer, offload="optimizer") == 840_750_000
    assert deepspeed(**model, stage=3, **layer, offload="all") == 128_000_000
    with pytest.raises(ValueError, match="no estimator of stage 2 with offload='all'"):
        deepspeed(**model, stage=2, offload="all")


def test_megatrons_distributed_optimizer():
    assert megatron(1000, 1) == 18_000
    assert megatron(1000, 3) == 6000 + 4000


def test_axonns_volumes():
    grid = GridDegrees(depth=2, row=2, col=2)
    volumes = layer_volumes(grid, 16, 2048, 4096, 16_384)
    assert volumes == {"data": 0, "depth": 50_331_648, "row": 67_108_864, "col": 268_435_456}
    assert layer_volumes(GridDegrees(data=2, depth=2, row=2, col=2), 16, 2048, 4096, 16_384)["data"] == 33_554_432
    # A transposed layer of the swapped grid sends the same, with row and col in each other's place.
    uneven, swapped = GridDegrees(row=4, col=2), GridDegrees(row=2, col=4)
    plain, other = layer_volumes(uneven, 8, 16, 32, 64), layer_volumes(swapped, 8, 16, 32, 64, transposed=True)
    assert (plain["row"], plain["col"]) == (other["col"], other["row"])


def test_axonns_volumes_are_ring_volumes():
    """The table's factors are those of `wire_elements`: an all-reduce twice, a gather and a scatter once."""
    volumes = layer_volumes(GridDegrees(depth=2, row=4, col=2), 8, 16, 32, 64)
    block, rows = 32 * 64 // 8, 8 * 16 // 2
    assert volumes["depth"] == 2 * (
        2 * wire_elements("all_gather", block, 2) + wire_elements("reduce_scatter", block, 2)
    )
    assert volumes["row"] == 2 * wire_elements("all_reduce", rows * 32 // 2, 4)
    assert volumes["col"] == 2 * wire_elements("all_reduce", rows * 64 // 4, 2)
