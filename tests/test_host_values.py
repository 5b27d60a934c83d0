"""Values that units in loops keep in the host's memory: sent in the lowered program, equal to one device, else refused."""

import re
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from meshes import mesh_of
from plan_models import F64, linear, regression, weighted_loss
from predicted_steps import GPT, LLAMA, config, step_of

import axonml_jax as ax
from axonml_jax.parallel import recompute
from axonml_jax.parallel.recompute import Recompute, WithinBytes
from axonml_jax.program.recompute import Rates
from axonml_jax.testing.equality import assert_equals_single_device
from axonml_jax.training import budget

POLICY = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[], names_which_can_be_offloaded=["made"], offload_src="device", offload_dst="pinned_host"
)
REMATS = {"names": ["host:input", "host:made"], "policy": POLICY, "units": {"part 1": ["host:stack"]}}


class Scanned(nnx.Module):
    """Four blocks in a loop, each with a value that its user named."""

    def __init__(self, rngs):
        self.stack = nnx.Param(jax.random.normal(rngs.params(), (4, 6, 6), F64) / 3)
        self.first, self.last = linear(5, 6, rngs), linear(6, 3, rngs)

    def __call__(self, x):
        block = lambda x, kernel: (x + jnp.sin(checkpoint_name(jnp.tanh(x @ kernel), "made")), None)
        x, _ = jax.lax.scan(block, self.first(x), self.stack[...])
        return self.last(x)


class Unrolled(Scanned):
    """The same, as Python runs it."""

    def __call__(self, x):
        x = self.first(x)
        for i in range(4):
            x = x + jnp.sin(checkpoint_name(jnp.tanh(x @ self.stack[i]), "made"))
        return self.last(x)


PLANS = {
    "ddp": ({"data": 2}, {}),
    "ddp, typed, accumulated": ({"data": 2}, {"check_vma": True, "accumulate": 2}),
    "fsdp": ({"fsdp": 2}, {}),
    "fsdp, typed": ({"fsdp": 2}, {"check_vma": True}),
    "fsdp, accumulated, ahead": ({"fsdp": 2}, {"accumulate": 2, "fsdp": ax.Shard(prefetch=1)}),
}


@pytest.mark.filterwarnings("ignore:.*XLA for CPUs drops that")
@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.parametrize("name", PLANS)
def test_what_is_sent_to_the_host_trains_as_on_one_device(name, remat):
    degrees, options = PLANS[name]
    plan = ax.Plan(remat=REMATS[remat], **options)
    assert_equals_single_device(
        Scanned(nnx.Rngs(0)), weighted_loss, regression(8), plan, mesh=mesh_of(**degrees), steps=2
    )


def sent(step, *args):
    """How many values the lowered step places in the host's memory, and back on the device."""
    text = step.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    found = re.findall(r"annotate_device_placement.*?_xla_buffer_placement = \"(\w+)\"", text)
    return found.count("pinned_host"), found.count("device")


MODEL = config(LLAMA, num_layers=3, scan_layers=True)
STEPS = {
    "ddp": ({"data": 2}, {}),
    "fsdp, accumulated": ({"data": 1, "fsdp": 2}, {"accumulate": 2}),
    "context": ({"data": 1, "context": 2}, {}),
}


@pytest.mark.filterwarnings("ignore:.*XLA for CPUs drops that")
@pytest.mark.parametrize("name", STEPS)
def test_a_loop_sends_each_value_once_in_its_body_and_brings_it_back_once(name):
    degrees, options = STEPS[name]
    for remat, number in ((None, 0), (["host:input"], 1), (["host:input", "host:mlp/up", "attention/out"], 2)):
        assert sent(*step_of(MODEL, ax.Plan(remat=remat, **options), degrees, 8)) == (number, number)


def test_what_cannot_be_sent_is_refused_and_what_is_not_sent_is_said(monkeypatch):
    batch, mesh = regression(8), mesh_of(data=2)
    trainer = lambda model, **own: ax.DDP(model(nnx.Rngs(0)), mesh, **own).trainer(optax.sgd(0.1), weighted_loss)
    with pytest.raises(ValueError, match=r"sends values of the units \[.*these are no loops.*Loop over the blocks"):
        trainer(Unrolled, remat=["host:made"]).step(batch)
    with pytest.raises(ValueError, match=r"\['nowhere'\] finds none of the values"):
        trainer(Scanned, remat=["host:nowhere"]).step(batch)
    for remat in (["host:made"], POLICY):
        with pytest.warns(UserWarning, match=r"to the host: XLA for CPUs drops that"):
            trainer(Scanned, remat=remat).step(batch)
    pipe = lambda **own: ax.Pipeline(Unrolled(nnx.Rngs(0)), mesh_of(pipe=2), num_microbatches=2, split=("last",), **own)
    for remat in (POLICY, ["host:made"]):
        with pytest.raises(
            ValueError, match=r"remat.* sends .*(made|stage 0).* to the host: a pipeline's stages keep in slots"
        ):
            pipe(remat=remat).trainer(optax.sgd(0.1), weighted_loss).step(batch)
    monkeypatch.setattr(recompute, "platform_around", lambda: "tpu")
    trainer(Scanned, remat=POLICY).step(batch)  # nothing to say
    with pytest.warns(UserWarning, match=r"in a unit that is no loop: XLA for TPUs then holds more"):
        trainer(Unrolled, remat=POLICY).step(batch)


SENDING = Rates(1e11, 1e11, 1e10, host=1e12)


def chosen(allowance, rates, model=MODEL, **plan):
    """What is chosen for a scanned model under FSDP within so many bytes."""
    chooser = WithinBytes(allowance, rates)
    step, *args = step_of(model, ax.Plan(remat=chooser, **plan), {"data": 1, "fsdp": 2}, 16)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*XLA for CPUs drops that")
        return chooser, sent(step, *args)


@pytest.mark.slow
def test_a_budget_sends_where_there_is_a_link_and_the_choice_is_a_value():
    _, without = chosen(0, SENDING._replace(host=0.0))
    assert without == (0, 0)
    unrolled, none = chosen(0, SENDING, config(GPT))
    assert none == (0, 0) and not any(unit.host for unit in unrolled.found.units)
    least, _ = chosen(0, SENDING._replace(host=0.0))
    chooser, (out, back) = chosen(0, SENDING)
    found = chooser.found
    assert out == back > 0 and found.live < least.found.live
    loop = next(unit for unit in found.units if unit.host)
    assert "input" in loop.host and loop.away > 0 and loop.trips == 3
    assert not {*loop.host} & {*loop.keep} and not {*loop.host} & {*loop.again}
    assert Recompute.of(found.to_dict()) == found
    for word in ("on the host", "host bytes", "input"):
        assert word in str(found)
    step, *args = step_of(MODEL, ax.Plan(remat=found.to_dict()), {"data": 1, "fsdp": 2}, 16)
    with pytest.warns(UserWarning, match="XLA for CPUs drops that"):
        assert sent(step, *args) == (out, back)


@pytest.mark.slow
def test_no_more_is_on_the_host_than_may_be():
    fewest, _ = chosen(0, SENDING)
    loop = max(fewest.found.units, key=lambda unit: unit.away)
    for part in (1, 2):
        chooser = WithinBytes(0, SENDING, host=loop.away * 2 // part - 1)
        step, *args = step_of(MODEL, ax.Plan(remat=chooser), {"data": 1, "fsdp": 2}, 16)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*XLA for CPUs drops that")
            step.trace(*args)
        assert sum(unit.away for unit in chooser.found.units) <= loop.away * 2 // part - 1
    assert loop.away > 0 and not any(unit.host for unit in chooser.found.units)


@pytest.mark.slow
def test_more_room_repeats_and_sends_less():
    fewest, _ = chosen(0, SENDING)
    tried = [chosen(share * fewest.found.live, SENDING)[0].found for share in (1, 2, 1000)]
    seconds = [found.seconds for found in tried]
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] < seconds[0]
    assert not any(unit.host for unit in tried[-1].units)


def test_cpus_are_sent_nothing():
    assert budget._RATES["cpu"].host == 0 < budget._RATES["tpu"].host < budget._RATES["gpu"].host
