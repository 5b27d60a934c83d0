"""Attention in models of packages that others publish: found in their losses, and put back with nothing changed."""

import importlib.util
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks" / "truth"))

from foreign import FAMILIES, plain

from axonml_jax.attention.recognise import find_attention
from axonml_jax.attention.rewrite import plain_attention, replaced
from axonml_jax.compat.jaxpr import trace
from axonml_jax.program.program import read_program
from axonml_jax.testing.equality import difference

BY_NAME = {family.name: family for family in FAMILIES}
PADDED, EACH = "keys where bool[8, 1, 1, 8] (batch, 1, 1, key)", "every key"
BOTH = "causal, keys where int32[8, 8] (batch, key)"
LOOKED_UP = "the mask bool[8, 8, 8] (batch, query, key)"
NEAR = "le of int64[8, 8, 1] (batch, query, 1) and int64[8] (key), ge of int64[8, 8, 1] (batch, query, 1) and int64[8] (key)"

# What is seen in each of a model's attentions; the last block of a transformer in transformer drops its inner half.
SEEN = {
    "Transformer in transformer": [EACH] * 4,
    "BERT": [PADDED] * 2,
    "RoBERTa with dropout": [PADDED] * 2,
    "GPT-2": [BOTH] * 2,
    "BART": [PADDED, PADDED, "causal", PADDED, "causal", PADDED],
    "ViT": [EACH] * 2,
    "wav2vec 2.0": [EACH] * 2,
    "U-Net (diffusers)": [EACH] * 8,
    "Llama 3 (Tunix)": [LOOKED_UP] * 2,
    "Gemma 2 (Tunix)": [f"{NEAR}, {LOOKED_UP}", LOOKED_UP],
    "Qwen 3 (Tunix)": [LOOKED_UP] * 2,
    "Qwen 3 of experts (Tunix)": [LOOKED_UP] * 2,
    "Mamba-2": [],
    "ResNet (jax-resnet)": [],
}


@pytest.mark.parametrize("name", SEEN)
def test_attention_of_other_peoples_models_is_found_and_put_back(name):
    module = BY_NAME[name].package.replace("google-", "").replace("-", "_")
    if importlib.util.find_spec(module) is None:  # importing all of a package may need more than its models do
        pytest.skip(f"needs {BY_NAME[name].package}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs
        made = BY_NAME[name].made(jnp.float64)
        batch = jax.tree.map(jnp.asarray, plain.cast(made.batch(np.random.default_rng(3)), np.float64))
        view = plain.NNX(made) if made.params is None else plain.Linen(made)
        loss = lambda params: made.loss_fn(view.call(params, view.state, jax.random.key(1), None), batch)
        traced = trace(loss, view.params)
    found = find_attention(read_program(traced.jaxpr), range(len(jax.tree.leaves(view.params))))
    assert [", ".join(map(str, each.mask)) or EACH for each in found.attentions] == SEEN[name] and not found.missed
    left = [each.left for each in found.attentions if each.left]
    assert left == (["nothing reads its result"] if name == "Transformer in transformer" else [])

    run = replaced(found, plain_attention)
    again = lambda params: traced.out_tree.unflatten(run(jax.tree.leaves(params)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (value, wanted), (got_value, got) = (jax.jit(jax.value_and_grad(f))(view.params) for f in (loss, again))
    flat = lambda value, grads: jnp.concatenate([value[None], *(x.ravel() for x in jax.tree.leaves(grads))])
    ours, theirs = flat(got_value, got), flat(value, wanted)
    assert difference(*((ours, theirs) if made.double else (ours.astype("f4"), theirs.astype("f4"))), False) is None
