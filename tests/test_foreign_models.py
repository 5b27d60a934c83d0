"""A share of docs/maintainers/foreign-models.md: models of packages that the extra `test` brings, held to plain `jax.jit`."""

import importlib.util
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks" / "truth"))

from foreign import FAMILIES, cells

import axonml_jax as ax
from axonml_jax.testing.equality import assert_equals_single_device

BY_NAME = {family.name: family for family in FAMILIES}

# Every plan and variant at least once; the whole product is the script's.
CELLS = [
    ("Mamba-2", "FSDP", "remat"),
    ("Mamba-2", "Pipeline", "accumulate"),
    ("Mamba-2", "tensor, automatic", "plain"),
    ("Transformer in transformer", "tensor, by rules", "plain"),
    ("ResNet (jax-resnet)", "Pipeline", "plain"),
    ("ResNet (jax-resnet)", "HYBRID", "accumulate"),
    ("ResNet (jax-resnet)", "DDP", "bf16"),
]


@pytest.mark.parametrize(("family", "plan", "variant"), CELLS)
@pytest.mark.slow
def test_other_peoples_models_train_as_on_one_device(family, plan, variant):
    pytest.importorskip(BY_NAME[family].package.replace("-", "_"), reason="needs the extra `test`")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs
        result, why = cells.run(BY_NAME[family], plan, variant, {})
    assert result == "equal", why


@pytest.mark.parametrize("method", ["gather", "ulysses", "ring", (2, "ring")], ids=str)
@pytest.mark.parametrize("ranks", [2, 4])
def test_tunix_llama_trains_with_its_sequences_split(method, ranks):
    """Loss, gradients and parameters after two steps; nothing but attention may send along the axis. It has no dropout."""
    if importlib.util.find_spec("tunix") is None:
        pytest.skip("needs google-tunix")
    if ranks == 2 and isinstance(method, tuple):
        pytest.skip("two ranks are one group of two")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs
        made = BY_NAME["Llama 3 (Tunix)"].made(jnp.bfloat16)  # parameters in float32, in which it computes
        batches = [made.batch(np.random.default_rng(seed)) for seed in range(2)]
        plan = ax.Plan(context=ax.Context(method=method, allow_communication=False))
        mesh = ax.make_mesh(context=ranks, devices=jax.devices()[:ranks])
        assert_equals_single_device(made.model, made.loss_fn, batches, plan, mesh=mesh, max_grad_norm=0.5)
