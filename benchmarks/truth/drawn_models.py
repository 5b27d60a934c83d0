"""Models that `random_plans.py` draws, each by a few plain values: the tests' small ones, and the library's transformer."""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np

WORDS, LENGTH = 24, 8

TRANSFORMER: dict[str, list] = {
    "num_kv_heads": [1, 2],
    "position": ["learned"],
    "norm": ["layernorm"],
    "activation": ["gelu", "geglu"],
    "tie_embeddings": [True],
    "scale_embeddings": [True],
    "logit_softcap": [0.5],
    "attention_softcap": [0.5],
    "query_scalar": [6.0],
    "use_bias": [True],
    "qkv_bias": [True],
    "window": [3],
    "full_every": [2],
    "sinks": [True],
    "qk_norm": [True],
    "head_dim": [6],
    "post_norms": [True],
    "zero_centered_norm": [True],
    "sequence_parallel": [True],
    "ring": [True],
    "overlap": [True],
    "prefetch": [True],
    "scan_layers": [True],
    "loss_chunk": [0, 8],
    "attention": ["xla", "blocks"],
    "dropout": [0.2],
}
"""Options of a `TransformerConfig` and values besides their defaults."""
EXPERTS: dict[str, list] = {
    "top_k": [1, 3],
    "every": [2],
    "first_dense": [1],
    "router": ["sigmoid"],
    "renormalize": [False],
    "groups": [2],
    "scale": [1.5],
    "bias_rate": [0.05, 0.0],
    "router_bias": [True],
    "activation": ["gelu", "clamped_swiglu"],
    "shared_size": [8],
    "capacity_factor": [1.0],
    "dispatch": ["rounds", "gather"],
    "z": [0.1],
    "inner_size": [8],
}
LATENT = {"kv_rank": 6, "query_rank": 5, "plain_size": 4, "rotary_size": 2, "value_size": 3}


@dataclass(frozen=True)
class Subject:
    """A model with its loss and batches."""

    model: Any
    loss: Any
    batch: Any
    params: Any = None


def some(draw: random.Random, options: dict[str, list], chance: float) -> dict[str, Any]:
    """Each of these options with that chance, and one of its values."""
    return {name: draw.choice(values) for name, values in options.items() if draw.random() < chance}


def drawn_transformer(draw: random.Random) -> dict[str, Any]:
    """Of a transformer: most options are as by default."""
    config: dict[str, Any] = {"num_layers": draw.choice([1, 1, 2])} | some(draw, TRANSFORMER, 0.1)
    if draw.random() < 0.25:
        config["split"] = "grid"
    if draw.random() < 0.3:
        config["experts"] = {"num_experts": draw.choice([4, 4, 8, 6])} | some(draw, EXPERTS, 0.12)
    elif draw.random() < 0.1:
        config["latent"] = LATENT
    return config


def transformer(options: dict[str, Any]) -> Subject:
    """In float32, which is the widest that it takes."""
    from flax import nnx

    import axonml_jax as ax
    from axonml_jax.layers.options import LatentConfig
    from axonml_jax.models.config import ExpertsConfig, TransformerConfig
    from axonml_jax.models.transformer import Transformer

    kinds = {"experts": (ExpertsConfig, EXPERTS | {"num_experts": []}), "latent": (LatentConfig, LATENT)}
    given = {name: options[name] for name in kinds if isinstance(options.get(name), dict)}
    nested = {
        name: kinds[name][0](**values)
        for name, values in given.items()
        if any(each in kinds[name][1] for each in values)
    }
    sizes = {"vocab_size": WORDS, "hidden_size": 16, "num_heads": 4, "max_length": 2 * LENGTH, "mlp_hidden_size": 32}
    config = TransformerConfig(**{**sizes, **options, **nested})

    def batch(rows, seed):
        drawn = np.random.default_rng(seed)
        ids = drawn.integers(0, min(WORDS, config.vocab_size), (rows, LENGTH + 1)).astype(np.int32)
        ends = drawn.integers(1, LENGTH + 1, rows)
        return {"tokens": ids[:, :-1], "targets": np.where(np.arange(LENGTH) < ends[:, None], ids[:, 1:], -1)}

    loss = lambda model, batch: ax.WeightedMean(*model.loss(batch["tokens"], batch["targets"]))
    return Subject(Transformer(config, rngs=nnx.Rngs(0, dropout=1)), loss, batch)


def plain(options: dict[str, Any]) -> Subject:
    """A model that knows nothing of the library, whose layers may be swapped for parallel ones."""
    import jax
    from test_tensor_partitioned import Linen, Nnx, squares

    batch = lambda rows, seed: np.random.default_rng(seed).normal(size=(rows, 8))
    if options["kind"] == "nnx":
        return Subject(Nnx(), squares, batch)
    return Subject(Linen(), squares, batch, Linen().init(jax.random.key(0), batch(2, 0)))


def of_table(options: dict[str, Any]) -> Subject:
    """One of the models of DDP's and FSDP's tables."""
    from plan_models import CASES

    case = CASES[options["case"]]
    return Subject(case.model(), case.loss, case.batch, case.params())


def of_stages(options: dict[str, Any]) -> Subject:
    """One of the models of pipelines."""
    from pipeline_models import MODELS

    model, params, loss, batch = MODELS[options["case"]](options["stages"])
    return Subject(model, loss, batch, params)


def of_experts(options: dict[str, Any]) -> Subject:
    """Residual blocks of experts."""
    from expert_models import Net, batch_of, loss_fn

    return Subject(Net(**options), loss_fn, lambda rows, seed: batch_of(rows, seed, masked=True))


def of_layers(options: dict[str, Any]) -> Subject:
    """The library's layers: Megatron's or AxoNN's."""
    from plan_models import regression, tokens
    from test_tensor_plans import Cube, Language, squares, vocabulary_loss

    if options["split"] == "grid":
        return Subject(Cube(), squares, regression)
    return Subject(Language(options["sequence_parallel"]), vocabulary_loss, tokens)


SUBJECTS = {
    "table": of_table,
    "stages": of_stages,
    "transformer": transformer,
    "experts": of_experts,
    "layers": of_layers,
    "plain": plain,
}
