"""`explain` and its report: the printed tables to the letter, totals, minima, JSON."""

import json
from fractions import Fraction

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from ledger_steps import SWAP, abstract_mesh, ddp_step, floats, on_mesh, zero3_step

from axonml_jax.ledger.report import Report, explain

PARAMS = {"w": floats(5, 7), "b": floats(7)}


def ddp_report(ranks=8, **options):
    return explain(ddp_step(abstract_mesh(data=ranks), check_vma=False), PARAMS, floats(2 * ranks, 5), **options)


def odd_step():
    """Everything that needs a note: padding, a while loop, branches of unequal weight, fractions of a byte."""

    def body(x):
        with jax.named_scope("axonml.gradients.pad5"):
            y = lax.psum(x[:7, :1], "data")
        z = lax.psum(y.sum(), ("data", "tensor"))
        z = lax.cond(z > 0, lambda c: lax.pmax(c, "tensor"), lambda c: lax.pmin(lax.pmin(c, "tensor"), "tensor"), z)
        x = lax.while_loop(lambda c: c[0, 0] < 3, lambda c: lax.ppermute(c, "data", SWAP), x)
        return x.sum() + y.sum() + z

    return on_mesh(body, mesh=abstract_mesh(data=3, tensor=2), out_specs=P())


def odd_report():
    return explain(odd_step(), floats(48, 8))


def test_a_ddp_step_prints_beside_its_minimum():
    expected = """\
label      collective  axes      dtype    where  count  launches  elements  bytes/rank
---------  ----------  --------  -------  -----  -----  --------  --------  ----------
gradients  all_reduce  data (8)  float32  once       1         2        42         294
metrics    all_reduce  data (8)  float32  once       1         1         1           7

axes   bytes/rank
-----  ----------
data          301
total         301

against published     bytes/rank  published   ratio
--------------------  ----------  ---------  ------
gradients+parameters         294        294  1.0000"""
    assert str(ddp_report(minimum=4 * 2 * 42 * 7 / 8)) == expected


def test_what_the_numbers_leave_open_is_said():
    expected = """\
label      collective  axes             dtype    where       count  launches  elements  bytes/rank
---------  ----------  ---------------  -------  ----------  -----  --------  --------  ----------
-          permute     data (3)         float32  while[?]        1         1        64         256
padding    all_reduce  data (3)         float32  once            0         0         5        26.7
scalars    all_reduce  tensor (2)       float32  branch 1/2      2         2         2           8
scalars    all_reduce  data,tensor (6)  float32  once            1         1         1         6.7
scalars    all_reduce  tensor (2)       float32  branch 2/2      1         1         1         (4)
gradients  all_reduce  data (3)         float32  once            1         1         2        10.7

axes         bytes/rank
-----------  ----------
data              293.3
tensor                8
data,tensor         6.7
total               308

note: a while loop's rows are of one trip: its trip count depends on the data
note: rows in parentheses are in branches that a heavier one outweighs: totals leave them out"""
    assert str(odd_report()) == expected


def test_totals_add_up_and_leave_out_lighter_branches():
    report = odd_report()
    assert report.total_bytes == 308 == sum(report.bytes_by_axes.values()) == sum(report.bytes_by_label.values())
    assert report.bytes_by_label["padding"] == Fraction(80, 3)
    assert report.bytes_by_axes["tensor",] == 8


def test_rows_count_launches_and_keep_lighter_branches_apart():
    def hop(x):
        return lax.ppermute(x, "data", SWAP)

    def body(x):
        trip = lambda c, _: (sum(lax.psum((c, c * 2), "tensor")), None)
        x, _ = lax.scan(trip, x, None, length=3)
        x = lax.cond(x[0, 0] > 0, lambda c: hop(hop(c)), hop, x)
        return lax.cond(x[0, 0] > 0, lambda c: c, hop, x)

    rows = [(row.where, row.counted, row.count, row.launches) for row in explain(on_mesh(body), floats(64, 8)).traffic]
    assert sorted(rows) == [
        ("branch 1/2", False, 1, 1),
        ("branch 1/2", True, 1, 1),
        ("branch 2/2", True, 2, 2),
        ("scan[3]", True, 3, 6),
    ]


def test_each_label_has_its_own_minimum():
    weights = 6 * 81 * 4
    step = zero3_step(abstract_mesh(fsdp=3), layers=6, check_vma=False)
    minimum = {"gradients": weights * Fraction(2, 3), "parameters": weights * Fraction(4, 3), "norm": 0}
    report = explain(step, floats(6, 9, 9), floats(3, 9), minimum=minimum)
    assert [(t.name, t.sent, t.ratio) for t in report.targets] == [
        ("gradients", 1296, 1.0),
        ("parameters", 2592, 1.0),
        ("norm", 0, None),
    ]
    assert all(row.where == "scan[6]" for row in report.traffic)


def test_one_number_means_unlabelled_traffic_when_nothing_is_labelled():
    def body(x):
        return lax.psum(x, "data") + lax.psum(jnp.sum(x), "data")

    (target,) = explain(on_mesh(body), floats(64, 8), minimum=128).targets
    assert (target.sent, target.ratio) == (256, 2.0)


@pytest.mark.parametrize("minimum", [-1, float("nan"), {"gradients": float("inf")}])
def test_impossible_minima_are_refused(minimum):
    with pytest.raises(ValueError, match="finite and not negative"):
        ddp_report(minimum=minimum)


def test_reports_are_values_and_go_to_json():
    report = ddp_report(minimum=294)
    assert report == ddp_report(minimum=294) != ddp_report(ranks=4, minimum=294)
    data = json.loads(report.to_json())
    assert data == json.loads(report.to_json(indent=None)) == json.loads(json.dumps(report.to_dict()))
    assert data["total_bytes"] == 301
    assert data["bytes_by_axes"] == {"data": 301}
    assert data["traffic"][0]["label"] == "gradients"
    assert data["targets"] == [{"name": "gradients+parameters", "sent": 294, "minimum": 294, "ratio": 1.0}]


def test_a_program_without_explicit_collectives_says_so():
    report = explain(jax.jit(lambda x: x + 1), floats(3))
    assert report == Report(())
    assert str(report).startswith("nothing is communicated\n\nnote: no explicit collective")
    assert (report.total_bytes, report.traffic) == (0, ())


def test_arrays_are_neither_run_nor_donated():
    x = jnp.ones((48, 8), jnp.float32)
    step = jax.jit(odd_step(), donate_argnums=0)
    assert explain(step, x) == explain(step, floats(48, 8))
    assert not x.is_deleted()


def test_keyword_arguments_and_objects_with_a_trace_method_are_traced():
    class Step:
        jitted = staticmethod(
            jax.jit(lambda params, *, batch: ddp_step(abstract_mesh(data=2), check_vma=True)(params, batch))
        )

        def trace(self, *args, **kwargs):
            return self.jitted.trace(*args, **kwargs)

    assert explain(Step(), PARAMS, batch=floats(4, 5)).total_bytes == 4 * 42 + 4
