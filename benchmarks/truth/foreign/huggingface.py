"""Flax models of Hugging Face's `transformers` (before 5) and of `diffusers` (before 0.36): Linen modules, random weights."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from .family import ROWS, Family, Made, cross_entropy, squares

VOCABULARY, LENGTH = 64, 8
WHOLE = {".*": P()}


def tokens(*names: str, length: int = LENGTH) -> Any:
    """Draws batches of token ids, one array per name, and a mask that hides the end of some rows."""

    def draw(generator: np.random.Generator) -> dict[str, np.ndarray]:
        ids = {name: generator.integers(3, VOCABULARY, (ROWS, length)) for name in names}
        lengths = generator.integers(length // 2, length + 1, (ROWS, 1))
        return {**ids, "mask": (np.arange(length) < lengths).astype(np.int32)}

    return draw


def linen(model: Any, loss_fn: Any, batch: Any, rules: Any, **more: Any) -> Made:
    """What a user takes out of a Hugging Face model: its module, and the variables it was initialised with."""
    given = jax.jit(lambda key: model.init_weights(key, model.input_shape))(jax.random.key(0))
    params = dict(given) if "params" in given else {"params": given}
    return Made(model.module, params, loss_fn, batch, rules, **more)


def bert(dtype: Any) -> Made:
    """An encoder, its output a dataclass; masked rows; no dropout (deterministic)."""
    import transformers as hf

    config = hf.BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16,
    )  # fmt: skip
    model = hf.FlaxBertForMaskedLM(config, dtype=dtype, _do_init=False)

    def loss_fn(model: Any, batch: Any) -> Any:
        ids = batch["ids"]
        kinds, places = jnp.zeros_like(ids), jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        return cross_entropy(model(ids, batch["mask"], kinds, places, None).logits, batch["labels"])

    return linen(model, loss_fn, tokens("ids", "labels"), BERT_RULES)


BERT_RULES = {
    ".*/(query|key|value|intermediate/dense)/kernel": P(None, "tensor"),
    ".*/(attention/output|output)/dense/kernel": P("tensor"),
    ".*word_embeddings/embedding": P("tensor"),
    ".*": P(),
}


def roberta_with_dropout(dtype: Any) -> Made:
    """An encoder in training: dropout of hidden states and of attention, from Linen's stream `dropout`."""
    import transformers as hf

    config = hf.RobertaConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16, type_vocab_size=1, num_labels=3,
    )  # fmt: skip
    model = hf.FlaxRobertaForSequenceClassification(config, dtype=dtype, _do_init=False)

    def loss_fn(model: Any, batch: Any) -> Any:
        ids = batch["ids"]
        kinds, places = jnp.zeros_like(ids), jnp.broadcast_to(2 + jnp.arange(ids.shape[1]), ids.shape)
        return cross_entropy(
            model(ids, batch["mask"], kinds, places, None, deterministic=False).logits, batch["ids"][:, 0] % 3
        )

    return linen(model, loss_fn, tokens("ids"), BERT_RULES, draws=True)


def gpt2(dtype: Any) -> Made:
    """A decoder with tied embeddings and fused qkv projections."""
    import transformers as hf

    config = hf.GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    model = hf.FlaxGPT2LMHeadModel(config, dtype=dtype, _do_init=False)
    rules = {
        ".*/(c_attn|c_fc)/kernel": P("tensor"),  # their kernels are stored transposed
        ".*/c_proj/kernel": P(None, "tensor"),
        ".*/wte/embedding": P("tensor"),
        ".*": P(),
    }

    def loss_fn(model: Any, batch: Any) -> Any:
        ids = batch["ids"]
        places = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        return cross_entropy(model(ids, batch["mask"], places).logits, batch["labels"])

    return linen(model, loss_fn, tokens("ids", "labels"), rules)


def bart(dtype: Any) -> Made:
    """An encoder and a decoder with learned positions, both reading one embedding."""
    import transformers as hf

    config = hf.BartConfig(
        vocab_size=VOCABULARY, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=16,
    )  # fmt: skip
    model = hf.FlaxBartForConditionalGeneration(config, dtype=dtype, _do_init=False)
    rules = {
        ".*/(q_proj|k_proj|v_proj|fc1)/kernel": P(None, "tensor"),
        ".*/(out_proj|fc2)/kernel": P("tensor"),
        ".*": P(),
    }

    def loss_fn(model: Any, batch: Any) -> Any:
        ids, ones = batch["ids"], jnp.ones_like(batch["mask"])
        places = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        out = model(ids, batch["mask"], batch["decoded"], ones, places, places)
        return cross_entropy(out.logits, batch["labels"])

    return linen(model, loss_fn, tokens("ids", "decoded", "labels"), rules)


def images(size: int, classes: int = 4) -> Any:
    """Draws images of three channels, channels last, and a class for each."""

    def draw(generator: np.random.Generator) -> dict[str, np.ndarray]:
        pixels = generator.normal(size=(ROWS, size, size, 3)).astype(np.float32)
        return {"pixels": pixels, "labels": generator.integers(0, classes, ROWS)}

    return draw


def vit(dtype: Any) -> Made:
    """A vision transformer: a convolution cuts patches."""
    import transformers as hf

    config = hf.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=8, patch_size=4,
        num_labels=4,
    )  # fmt: skip
    model = hf.FlaxViTForImageClassification(config, dtype=dtype, _do_init=False)
    rules = {name.replace("word_embeddings/embedding", "projection/bias"): spec for name, spec in BERT_RULES.items()}
    loss_fn = lambda model, batch: cross_entropy(model(batch["pixels"]).logits, batch["labels"])
    return linen(model, loss_fn, images(8), rules)


def resnet(dtype: Any) -> Made:
    """A residual convolutional net with BatchNorm, its running averages updated."""
    import transformers as hf

    config = hf.ResNetConfig(
        num_channels=3, embedding_size=8, hidden_sizes=[16, 16], depths=[1, 1], layer_type="basic", num_labels=4
    )
    model = hf.FlaxResNetForImageClassification(config, input_shape=(1, 16, 16, 3), dtype=dtype, _do_init=False)
    loss_fn = lambda model, batch: cross_entropy(model(batch["pixels"], deterministic=False).logits, batch["labels"])
    return linen(model, loss_fn, images(16), {".*convolution/kernel": P(None, None, None, "tensor"), ".*": P()})


def regnet(dtype: Any) -> Made:
    """A convolutional net: grouped convolutions, squeeze and excite, BatchNorm."""
    import transformers as hf

    config = hf.RegNetConfig(
        num_channels=3, embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], groups_width=4, num_labels=4
    )
    model = hf.FlaxRegNetForImageClassification(config, input_shape=(1, 16, 16, 3), dtype=dtype, _do_init=False)
    loss_fn = lambda model, batch: cross_entropy(model(batch["pixels"], deterministic=False).logits, batch["labels"])
    return linen(model, loss_fn, images(16), {".*convolution/kernel": P(None, None, None, "tensor"), ".*": P()})


def wav2vec2(dtype: Any) -> Made:
    """An audio model: strided convolutions, a weight-normed convolution of positions, an encoder."""
    import transformers as hf

    config = hf.Wav2Vec2Config(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        conv_dim=[16, 16], conv_stride=[4, 2], conv_kernel=[8, 4], num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, feat_extract_norm="layer", do_stable_layer_norm=True, num_feat_extract_layers=2,
    )  # fmt: skip
    model = hf.FlaxWav2Vec2ForCTC(config, input_shape=(1, 128), dtype=dtype, _do_init=False)
    rules = {
        ".*/(q_proj|k_proj|v_proj|intermediate_dense)/kernel": P(None, "tensor"),
        ".*/(out_proj|output_dense)/kernel": P("tensor"),
        ".*": P(),
    }
    draw = lambda generator: {"sound": generator.normal(size=(ROWS, 128)).astype(np.float32)}
    return linen(model, lambda model, batch: squares(model(batch["sound"])[0]), draw, rules)


def unet(dtype: Any) -> Made:
    """A diffusion model's U-Net: skips from the way down to the way up, cross-attention, time embeddings."""
    from diffusers.models.unets.unet_2d_condition_flax import FlaxUNet2DConditionModel

    model = FlaxUNet2DConditionModel(
        sample_size=8, in_channels=2, out_channels=2, block_out_channels=(32, 32), layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16, attention_head_dim=8, dtype=dtype,
    )  # fmt: skip
    params = {"params": jax.jit(model.init_weights)(jax.random.key(0))}
    rules = {
        ".*/(to_q|to_k|to_v)/kernel": P(None, "tensor"),
        ".*/to_out_0/kernel": P("tensor"),
        ".*resnets_./conv1/kernel": P(None, None, None, "tensor"),
        ".*": P(),
    }

    def draw(generator: np.random.Generator) -> dict[str, np.ndarray]:
        normal = lambda *shape: generator.normal(size=(ROWS, *shape)).astype(np.float32)
        return {
            "noisy": normal(2, 8, 8),
            "noise": normal(2, 8, 8),
            "time": generator.integers(0, 99, ROWS),
            "text": normal(4, 16),
        }

    def loss_fn(model: Any, batch: Any) -> Any:
        return squares(model(batch["noisy"], batch["time"], batch["text"]).sample - batch["noise"])

    return Made(model, params, loss_fn, draw, rules, double=False)


FAMILIES = (
    Family("BERT", "encoder, output a dataclass", "transformers", bert),
    Family("RoBERTa with dropout", "dropout streams", "transformers", roberta_with_dropout),
    Family("GPT-2", "decoder, tied, fused qkv", "transformers", gpt2),
    Family("BART", "encoder-decoder", "transformers", bart),
    Family("ViT", "vision", "transformers", vit),
    Family("ResNet", "BatchNorm", "transformers", resnet),
    Family("RegNet", "convolutional net", "transformers", regnet),
    Family("wav2vec 2.0", "audio", "transformers", wav2vec2),
    Family("U-Net (diffusers)", "skip connections", "diffusers", unet),
)
