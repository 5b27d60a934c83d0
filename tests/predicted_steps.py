"""Small transformers under plans, as steps that are traced or compiled and as predictions of the same."""

import jax
import optax
from flax import nnx

import axonml_jax as ax
from axonml_jax.cli.tasks import loss_fn
from axonml_jax.layers.options import LatentConfig, RopeScaling
from axonml_jax.layers.whole import tensor_specs
from axonml_jax.model.view import functionalize
from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.transformer import Transformer
from axonml_jax.parallel.placement import bind_plan
from axonml_jax.training.run_state import abstract_state

GPT = {"norm": "layernorm", "activation": "gelu", "position": "learned", "tie_embeddings": True, "use_bias": True}
LLAMA = {"num_kv_heads": 2}
QWEN = {"num_kv_heads": 2, "head_dim": 6, "qk_norm": True, "qkv_bias": True}
GEMMA = {
    "num_kv_heads": 2, "head_dim": 6, "qk_norm": True, "zero_centered_norm": True, "post_norms": True, "activation": "geglu",
    "tie_embeddings": True, "scale_embeddings": True, "query_scalar": 7, "attention_softcap": 5.0, "logit_softcap": 3.0,
}  # fmt: skip
LATENT = {
    "latent": LatentConfig(kv_rank=8, query_rank=12, plain_size=4, rotary_size=2, value_size=4, mscale=1.0),
    "rope_scaling": RopeScaling(kind="yarn", factor=4.0, original_length=8, attention_factor=1.0),
}
LENGTH = 16


def config(style, **options):
    """A transformer of two blocks whose sizes divide over most meshes and not over 5 or 3."""
    sizes = {"vocab_size": 64, "num_layers": 2, "hidden_size": 32, "num_heads": 8, "mlp_hidden_size": 48}
    return TransformerConfig(**{**sizes, "max_length": 2 * LENGTH, **style, **options})


def step_of(model, plan, degrees, global_batch, length=LENGTH):
    """(step, abstract state, abstract batch) of the library's own training step with AdamW."""
    module = nnx.eval_shape(lambda: Transformer(model, rngs=nnx.Rngs(0)))
    view, shapes = functionalize(module)
    count = 1
    for ranks in degrees.values():
        count *= ranks
    mesh = ax.make_mesh(devices=jax.devices()[:count], **degrees)
    placement = bind_plan(plan, shapes, mesh, tensor_specs(module, mesh.shape), stacks=view.stacked_dims)
    tx = optax.adamw(1e-3)
    rows = jax.ShapeDtypeStruct((global_batch, length), "int32")
    step = ax.TrainStep(view, placement, mesh, loss_fn, tx)
    return step, abstract_state(shapes, tx, placement), {"tokens": rows, "targets": rows}
