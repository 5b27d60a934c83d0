"""A pipeline's step compiled for TPU chips that are not there: memory as predicted, updates in place, shifts in the loop."""

import importlib.util

import jax
import pytest

import axonml_jax as ax
from axonml_jax.ledger import predict
from axonml_jax.models.config import TransformerConfig
from axonml_jax.planner.verify import verify_plan

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (pip install 'axonml-jax[tpu]')"
)
GPT = {"norm": "layernorm", "activation": "gelu", "position": "learned", "use_bias": True}


@pytest.fixture(scope="module")
def verified():
    """What the compiler plans for 16 chips of a v5e at pipe 4 x data 4, beside the prediction."""
    model = TransformerConfig(
        vocab_size=1024, num_layers=8, hidden_size=2048, num_heads=16, max_length=512, tie_embeddings=False, **GPT
    )  # far smaller ones lie in the chip's scratch memory
    pipe, batch = ax.Pipelined(num_microbatches=8), 8 * 4 * 2
    plan = ax.Plan(mesh=ax.MeshShape(data=4, pipe=4), pipe=pipe, precision="bf16", remat="full")
    with jax.enable_x64(False):
        told = predict(plan, model, {"data": 4, "pipe": 4}, global_batch=batch, platform="tpu")
        yield verify_plan(plan, model, told, "v5e:4x4", batch, model.max_length)


def test_a_chip_holds_what_is_predicted_within_a_quarter(verified):
    arguments, _ = verified.memory.ratios
    assert abs(arguments - 1) < 0.05
    assert 1 / 1.25 <= verified.peak / verified.predicted_peak <= 1.25


def test_compiled_shifts_stay_in_the_loop_and_gradients_are_reduced_once(verified):
    in_loop = {kind for kind, _, loop in verified.collectives if loop}
    assert in_loop == {"permute"}
    assert any(kind == "all_reduce" for kind, _, loop in verified.collectives if not loop)
    assert verified.traffic == ()
