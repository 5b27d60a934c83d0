"""Models of other packages: Mamba-2 (NNX), and of Linen nested transformers, a ResNet, scanned blocks of SigLIP, MACE."""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax.sharding import PartitionSpec as P

from .family import ROWS, Family, Made, cross_entropy, squares, without_its_init
from .huggingface import images

VOCABULARY = 64
ATOMS = 4


def mamba(dtype: Any) -> Made:
    """A state space model: a depthwise convolution, a scan over chunks, a tied head, and a dict as output."""
    package = importlib.import_module("mamba2_jax")
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "state_size": 4, "head_dim": 8, "num_hidden_layers": 2}
    model = package.Mamba2ForCausalLM(package.Mamba2Config(**sizes, chunk_size=4), rngs=nnx.Rngs(0))

    def draw(generator: np.random.Generator) -> dict[str, np.ndarray]:
        ids = generator.integers(0, VOCABULARY, (2, ROWS, 8))
        return {"ids": ids[0], "labels": ids[1]}

    loss_fn = lambda model, batch: cross_entropy(model(batch["ids"])["logits"], batch["labels"])
    rules = {".*/in_proj/kernel": P(None, "tensor"), ".*/out_proj/kernel": P("tensor"), ".*": P()}
    example = draw(np.random.default_rng(0))["ids"]
    return Made(model, None, loss_fn, draw, rules, example, double=False)


def nested(dtype: Any) -> Made:
    """A transformer inside a transformer, all submodules made in `@nn.compact` calls."""
    package = importlib.import_module("transformer_in_transformer_flax")
    config = package.TNTConfig(
        num_classes=4, depth=2, image_size=8, patch_size=4, transformed_patch_size=2, inner_dim=4, inner_heads=2,
        inner_dim_head=2, outer_dim=8, outer_heads=2, outer_dim_head=4,
    )  # fmt: skip
    model = package.TransformerInTransformer(config=config)
    params = jax.jit(model.init)(jax.random.key(0), jnp.ones((1, 8, 8, 3)))
    rules = {
        ".*MlpBlock_./Dense_0/kernel": P(None, "tensor"),
        ".*MlpBlock_./Dense_1/kernel": P("tensor"),
        ".*SelfAttention_./(query|key|value)/kernel": P(None, "tensor"),
        ".*SelfAttention_./out/kernel": P("tensor"),
        ".*": P(),
    }
    return Made(model, params, classified, images(8), rules, double=False)


def resnet(dtype: Any) -> Made:
    """A residual convolutional net with BatchNorm: modules and functions in one `Sequential`, called `@nn.compact`."""
    package = importlib.import_module("jax_resnet")
    model = package.ResNet(package.ResNetBlock, stage_sizes=[1, 1], n_classes=4, hidden_sizes=(8, 16))
    params = jax.jit(model.init)(jax.random.key(0), jnp.ones((1, 16, 16, 3)))
    return Made(model, params, classified, images(16), {".*Conv_./kernel": P(None, None, None, "tensor"), ".*": P()})


def classified(model: Any, batch: Any) -> Any:
    """The cross-entropy of images and their classes."""
    return cross_entropy(model(batch["pixels"]), batch["labels"])


class Layer(linen.Module):
    """A block of the package as `nn.scan` wants it: a carry in, a carry and an output back."""

    block: linen.Module

    @linen.compact
    def __call__(self, x: Any, _: Any) -> tuple[Any, None]:
        """The block alone."""
        return self.block(x), None


class Scanned(linen.Module):
    """Patches, then blocks of the package under one `nn.scan` of an `nn.remat`.

    The package has this itself (`ViTModel(scan=True)`), but its block returns no pair, and Flax refuses to scan it.
    """

    block: linen.Module
    length: int

    @linen.compact
    def __call__(self, pixels: Any) -> Any:
        """Features of every patch."""
        x = linen.Conv(16, (4, 4), (4, 4), dtype=pixels.dtype)(pixels)
        stack = linen.scan(
            linen.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=self.length
        )
        return stack(self.block, name="layers")(x.reshape(x.shape[0], -1, 16), None)[0]


def siglip(dtype: Any) -> Made:
    """A vision transformer whose blocks are one `nn.scan` of an `nn.remat`."""
    for package in ("gemma", "gemma.gm", "gemma.gm.nn", "gemma.gm.nn.vision", "kauldron", "kauldron.typing"):
        without_its_init(package)  # of kauldron only annotations speak
    file = importlib.import_module("gemma.gm.nn.vision._vision_utils")
    block = file.Encoder1DBlock(0, mlp_dim=32, num_heads=2, dtype_mm=jnp.dtype(dtype).name, parent=None)
    model = Scanned(block, 2)
    params = jax.jit(model.init)(jax.random.key(0), jnp.ones((1, 8, 8, 3), dtype))
    rules = {
        ".*/(query|key|value)/kernel": P(None, None, "tensor"),  # dim 0 is the layer
        ".*/out/kernel": P(None, "tensor"),
        ".*/Dense_0/kernel": P(None, None, "tensor"),
        ".*/Dense_1/kernel": P(None, "tensor"),
        ".*": P(),
    }
    loss_fn = lambda model, batch: cross_entropy(model(batch["pixels"]).mean(1)[:, :4], batch["labels"])
    return Made(model, params, loss_fn, images(8), rules)


def mace(dtype: Any) -> Made:
    """Energies of molecules from tensor products of irreducible representations; a graph of dataclasses in and out."""
    from mlip.data.dataset_info import DatasetInfo
    from mlip.graph import graph as parts
    from mlip.graph.edge_ordering import DEFAULT_EDGE_ORDERING
    from mlip.models import Mace
    from mlip.models.predictors.conservative_predictor import ConservativePredictor
    from mlip.typing.properties import Properties

    about = DatasetInfo(
        atomic_energies_map={1: -0.5, 6: -1.0}, graph_cutoff_angstrom=3.0, avg_num_neighbors=3.0, avg_r_min_angstrom=1.0
    )
    config = Mace.Config(
        num_layers=2, num_channels=4, l_max=1, node_symmetry=1, correlation=2, readout_irreps=("4x0e", "0e"), num_rbf=4,
        radial_mlp_hidden=[8],
    )  # fmt: skip
    model = ConservativePredictor(Mace(config, about), Properties(energy=True))
    sends, receives = np.nonzero(~np.eye(ATOMS, dtype=bool))

    def graph(positions: Any, kinds: Any) -> Any:
        """All molecules of a batch as one graph; by the package's convention the last one, an atom alone, is padding."""
        count = positions.shape[0]
        first = ATOMS * np.arange(count)[:, None]
        zeros = lambda *shape: jnp.zeros(shape, positions.dtype)
        return parts.Graph(
            nodes=parts.GraphNodes(
                atomic_numbers=jnp.append(kinds.reshape(-1), 1),
                positions=jnp.concatenate([positions.reshape(-1, 3), zeros(1, 3)]),
            ),
            edges=parts.GraphEdges(shifts=zeros(count * len(sends), 3)),
            globals=parts.GraphGlobals(cell=zeros(count + 1, 3, 3), weight=1 + zeros(count + 1)),
            n_node=jnp.array([ATOMS] * count + [1]),
            n_edge=jnp.array([len(sends)] * count + [0]),
            senders=jnp.asarray((first + sends).reshape(-1)),
            receivers=jnp.asarray((first + receives).reshape(-1)),
            ordering=DEFAULT_EDGE_ORDERING,
        )

    def draw(generator: np.random.Generator) -> dict[str, np.ndarray]:
        places = generator.normal(size=(ROWS, ATOMS, 3)).astype(np.float32)
        return {"places": places, "kinds": generator.choice([1, 6], (ROWS, ATOMS))}

    def loss_fn(model: Any, batch: Any) -> Any:
        return squares(model(graph(batch["places"], batch["kinds"])).globals.energy[:-1] + 4.0)

    shape = jax.ShapeDtypeStruct
    shapes = jax.eval_shape(
        lambda key, places, kinds: model.init(key, graph(places, kinds)),
        jax.random.key(0), shape((1, ATOMS, 3), jnp.float32), shape((1, ATOMS), jnp.int32),
    )  # fmt: skip
    generator = np.random.default_rng(0)
    params = jax.tree.map(lambda x: jnp.asarray(generator.normal(size=x.shape), x.dtype) / 2, shapes)
    rules = {
        ".*/radial_mlp/layers_0/kernel": P(None, "tensor"),
        ".*/radial_mlp/layers_1/kernel": P("tensor"),
        ".*": P(),
    }
    return Made(model, params, loss_fn, draw, rules)


FAMILIES = (
    Family("Mamba-2", "state space model, output a dict", "mamba2-jax", mamba),
    Family("Transformer in transformer", "vision, compact", "transformer-in-transformer-flax", nested),
    Family("ResNet (jax-resnet)", "BatchNorm, compact", "jax-resnet", resnet),
    Family("SigLIP blocks, scanned", "`nn.scan` of `nn.remat`", "gemma", siglip),
    Family("MACE", "equivariant", "mlip", mace),
)
