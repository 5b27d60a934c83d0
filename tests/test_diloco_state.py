"""Runs of DiLoCo between two steps: checkpoints in the middle of a round, other replicas, parameters that somebody changes."""

import jax
import numpy as np
import optax
import pytest
from diloco_runs import INNER, Net, batches, loss_fn, model_of, reference
from flax import nnx
from meshes import mesh_of

import axonml_jax as ax
from axonml_jax.cli.tasks import loss_fn as lm_loss
from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.transformer import Transformer
from axonml_jax.sharding.layout import to_host
from axonml_jax.testing.equality import assert_trees_close


@pytest.mark.slow
def test_a_round_goes_on_bit_for_bit_from_a_checkpoint_in_its_middle(tmp_path):
    start = lambda **degrees: model_of("nnx", degrees, data=ax.DiLoCo(every=3)).trainer(optax.adam(1e-2), loss_fn)
    trainer, again = start(data=2, fsdp=2), start(data=2, fsdp=2)
    for batch in batches()[:4]:
        trainer.step(batch)
    ax.save(tmp_path / "middle", trainer)
    ax.restore(tmp_path / "middle", again)
    for batch in batches()[4:]:
        trainer.step(batch), again.step(batch)
    same = jax.tree.map(
        lambda a, b: a.tobytes() == b.tobytes(), *(to_host(each.state.rounds) for each in (trainer, again))
    )
    assert jax.tree.all(same)
    sharded_otherwise = start(data=2)
    ax.restore(tmp_path / "middle", sharded_otherwise)  # what is inside a replica may change
    model = ax.DDP(Net(), mesh_of(data=2))
    ax.restore(tmp_path / "middle", model)  # the model's part are the outer parameters
    middle = reference(
        model_of("nnx", {"data": 2}).parameters(), batches()[:4], ax.DiLoCo(every=3), 2, optax.adam(1e-2)
    )
    assert_trees_close(to_host(model.parameters()), to_host(middle[0]), "the model of a checkpoint")


def test_another_number_of_replicas_is_refused_and_begins_a_round_if_it_is_accepted(tmp_path, caplog):
    start = lambda replicas: model_of("nnx", {"data": replicas}, data=ax.DiLoCo(every=3)).trainer(INNER, loss_fn)
    saved, other = start(2), start(4)
    for batch in batches()[:4]:
        saved.step(batch)
    ax.save(tmp_path / "two", saved)
    with pytest.raises(ValueError, match=r"needed float64\[4, 2\], one entry for each of 4 replicas"):
        ax.restore(tmp_path / "two", other)
    ax.restore(tmp_path / "two", other, accept=("mismatched",))
    assert "they start from the outer parameters" in caplog.text
    outer, rounds = to_host((other.model.parameters(), other.state.rounds))
    assert_trees_close(outer, to_host(saved.model.parameters()), "outer")
    assert_trees_close(rounds.kept, to_host(saved.state.rounds.kept), "momentum")
    assert_trees_close(rounds.own, jax.tree.map(lambda x: np.stack([x] * 4), outer), "own")


def test_replicas_follow_parameters_that_somebody_changes(caplog):
    model = model_of("nnx", {"data": 2}, data=ax.DiLoCo(every=2))
    trainer = model.trainer(INNER, loss_fn)
    trainer.step(batches()[0])
    model.set_parameters(jax.tree.map(lambda x: 2 * x, model.parameters()))
    own = to_host(trainer.state.rounds.own)
    assert "replicas continue from them" in caplog.text
    assert_trees_close(own, jax.tree.map(lambda x: np.stack([x, x]), to_host(model.parameters())), "own")
    caplog.clear()
    trainer.step(batches()[1])
    model(batches()[0]["x"]), trainer.step(batches()[2])
    assert not caplog.text


TINY = {"vocab_size": 16, "num_layers": 1, "hidden_size": 8, "num_heads": 2, "mlp_hidden_size": 8, "max_length": 8}


@pytest.mark.slow
def test_replicas_of_a_transformer_may_have_parts_of_sequences():
    config = TransformerConfig(**TINY)
    rng, found = np.random.default_rng(0), []
    rows = [dict(zip(("tokens", "targets"), rng.integers(0, 16, (2, 8, 8)), strict=True)) for _ in range(3)]
    for degrees in ({"data": 2}, {"data": 2, "context": 2}):
        make = lambda: Transformer(config, rngs=nnx.Rngs(0))
        model = ax.parallelize(make, mesh_of(**degrees), ax.Plan(data=ax.DiLoCo(every=2)))
        trainer = model.trainer(INNER, lm_loss)
        losses = [to_host(trainer.step(batch)["loss"]) for batch in rows]
        found.append({"losses": losses, "model": to_host(model.parameters())})
    assert_trees_close(found[1], found[0], "replicas split over context")
