"""What cannot work is refused with the offender and a remedy, before anything is allocated on the mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from plan_models import CASES, DropoutMLP, LinenNet, mean_loss, regression

import axonml_jax as ax
from axonml_jax.layers.latent import LatentAttention
from axonml_jax.layers.options import LatentConfig

BATCH = regression(8)
MODEL = DropoutMLP(nnx.Rngs(0))


def mesh(**degrees):
    return ax.make_mesh(devices=jax.devices()[: int(np.prod(list(degrees.values())))], **degrees)


def ddp(given=None, *, model=MODEL, **options):
    return ax.DDP(model, mesh(data=2) if given is None else given, **options)


def planned(plan, given=None):
    return ax.parallelize(MODEL, given or mesh(data=2), plan)


MESHES = {
    "a wrong product": (lambda: ax.make_mesh(data=3), ["data=3", "8 devices", "nearest legal degrees", "[:3]"]),
    "a product that does not divide": (lambda: ax.make_mesh(data=-1, tensor=3), ["tensor=3", "divide", "nearest"]),
    "two open degrees": (lambda: ax.make_mesh(data=-1, tensor=-1), ["data=-1, tensor=-1", "one axis at most"]),
    "degree zero": (lambda: ax.make_mesh(data=0), ["data=0", "int >= 1"]),
    "an unknown axis": (lambda: ax.make_mesh(dta=8), ["'dta'", "did you mean 'data'"]),
    "a mesh with an unknown axis": (
        lambda: ddp(jax.make_mesh((2,), ("rows",))),
        ["['rows']", "data, pipe", "ax.Plan(axes={'rows': "],
    ),
    "two names for one axis": (lambda: ddp(jax.make_mesh((2, 2), ("dp", "data"))), ["['dp', 'data']", "share a name"]),
    "no mesh at all": (lambda: ddp("data"), ["'data' is no mesh", "jax.sharding.Mesh, a World, a ProcessGroup"]),
    "a number of devices": (lambda: ddp(4), ["4 is no mesh", "jax.sharding.Mesh"]),
    "a mesh without devices": (
        lambda: ddp(mesh(data=2).abstract_mesh),
        ["lives on devices", "give a jax.sharding.Mesh"],
    ),
    "a tensor axis under DDP": (
        lambda: ddp(mesh(data=2, tensor=2)),
        ["{'tensor': 2}", "no strategy", "the plan's axes"],
    ),
    "an fsdp axis under DDP": (lambda: ddp(mesh(data=2, fsdp=4)), ["{'fsdp': 4}", "no strategy"]),
    "degrees that are not the mesh's": (
        lambda: planned(ax.Plan(mesh=ax.MeshShape(data=1, tensor=2))),
        ["'tensor': 2", "{'data': 2}", "one or the other"],
    ),
    "degrees for other devices": (lambda: planned(ax.Plan(mesh=ax.MeshShape(data=4))), ["data=4", "2 devices"]),
}


class RawKey(nnx.Module):
    """Keeps a key as JAX had them before: two numbers."""

    def __init__(self):
        self.linear, self.noise = nnx.Linear(3, 3, rngs=nnx.Rngs(0)), nnx.RngKey(jax.random.PRNGKey(1), tag="noise")


MODELS = {
    "a stream that is no key": (lambda: ddp(model=RawKey()), ["nnx.RngKey", ": noise.", "jax.random.key(seed)"]),
    "Linen without variables": (lambda: ddp(model=LinenNet()), ["LinenNet is a Linen module", "params=module.init"]),
    "NNX with variables": (lambda: ddp(params={}), ["DropoutMLP is an NNX module", "leave params= out"]),
    "variables that are none": (lambda: ddp(model=LinenNet(), params=[1]), ["module.init returned", "list"]),
    "a function": (lambda: ddp(model=lambda x: x), ["flax.nnx.Module", "a function was given"]),
    "a class": (lambda: ddp(model=DropoutMLP), ["flax.nnx.Module", "the class DropoutMLP was given"]),
    "trainable that matches nothing": (lambda: ddp(trainable="^head/"), ["'^head/'", "6 parameters", "first/bias"]),
    "an empty list of patterns": (lambda: ddp(trainable=[]), ["trainable=[]", "first/bias"]),
    "what units keep as a word": (
        lambda: ax.Plan(remat={"blocks/0": "mlp/up", "blocks/1": 3}),
        [
            "remat={'blocks/0': 'mlp/up'}: a unit's path says the list of labels",
            "remat={'blocks/1': 3}",
            "'everything'",
        ],
    ),
    "a broken pattern": (lambda: ddp(trainable=["kernel", "("]), ["'('", "no regular expression"]),
    "trainable that says nothing": (
        lambda: ddp(trainable=True),
        ["trainable=True", "regular expressions", "None for all"],
    ),
    "a variable type the model lacks": (lambda: ddp(trainable=nnx.LoRAParam), ["LoRAParam", "none of the 6"]),
    "a seed that is no number": (lambda: ddp(seed="a"), ["seed='a'", "whole number"]),
}

OPTIONS = {
    "no microbatch": (lambda: ax.Plan(accumulate=0), ["accumulate=0", "positive whole number"]),
    "half a microbatch": (lambda: ax.Plan(accumulate=1.5), ["accumulate=1.5", "positive whole number"]),
    "more microbatches than can be counted": (lambda: ax.Plan(accumulate=10**30), ["accumulate=10", "below 2**31"]),
    "a flag for a number": (lambda: ax.Plan(accumulate=True), ["accumulate=True"]),
    "no bucket": (lambda: ddp(bucket_size_mb=0), ["bucket_size_mb=0", "positive", "25"]),
    "a flag for a bucket": (lambda: ddp(bucket_size_mb=True), ["bucket_size_mb=True", "positive number"]),
    "a bucket of text": (lambda: ddp(bucket_size_mb="25"), ["bucket_size_mb='25'", "positive number"]),
    "a bucket that is no number": (lambda: ddp(bucket_size_mb=float("nan")), ["bucket_size_mb=nan"]),
    "whole numbers on the wire": (lambda: ddp(comm_dtype="int32"), ["comm_dtype='int32'", "'bfloat16' or 'float16'"]),
    "a misspelled wire dtype": (lambda: ddp(comm_dtype="bfloat61"), ["comm_dtype='bfloat61'", "'bfloat16'"]),
    "a hook that is none": (lambda: ddp(comm_hook=1), ["comm_hook=1", "hook(flat_bucket, axes)"]),
    "a hook without a flat bucket": (
        lambda: ddp(comm_hook=ax.all_reduce_sum, gradient_as_bucket_view=True),
        ["comm_hook=", "gradient_as_bucket_view=True", "leave it out"],
    ),
    "a misspelled strategy": (lambda: ddp(sync_strategy="async"), ["sync_strategy='async'", "'overlapped'"]),
    "a bucket view that is no flag": (lambda: ddp(gradient_as_bucket_view="no"), ["gradient_as_bucket_view='no'"]),
    "misspelled statistics": (lambda: ddp(batch_stats="lokal"), ["batch_stats='lokal'", "'global' or 'local'"]),
    "a broadcast that is no flag": (
        lambda: ddp(batch_stats="local", broadcast_buffers="no"),
        ["broadcast_buffers='no'"],
    ),
    "a check that is no flag": (lambda: ddp(check_vma="off"), ["check_vma='off'", "True or False"]),
    "a misspelled policy": (
        lambda: ddp(precision="bf61"),
        ["'bf61'", "['bf16', 'bf16-reduce', 'bf16-reduce-float32', 'float32', 'fp16', 'fp8']", "ax.Precision"],
    ),
    "a policy that is none": (lambda: ddp(precision=16), ["precision 16", "ax.Precision"]),
    "a policy that is a list": (lambda: ddp(precision=["bf16"]), ["precision ['bf16']", "ax.Precision"]),
    "products in a list": (lambda: ax.Precision(products=["fp8"]), ["products=['fp8']", "'fp8' or None"]),
    "patterns that are a number": (
        lambda: ax.Precision(products="fp8", products_kept=3),
        ["products_kept=3", "regular expressions"],
    ),
    "misspelled dtypes": (
        lambda: ax.Precision(param="float23", compute="int8"),
        ["param='float23' is not a dtype", "compute=int8 is not a floating dtype", "or None"],
    ),
    "several at once": (
        lambda: ddp(bucket_size_mb=-1, comm_dtype="int8", sync_strategy="no"),
        ["bucket_size_mb=-1", "comm_dtype='int8'", "sync_strategy='no'"],
    ),
    "a plan that is none": (lambda: planned("ddp"), ["plan='ddp'", "ax.Plan"]),
    "a strategy that is none": (lambda: ax.Plan(data="ddp"), ["data='ddp'", "Replicate"]),
    "a mesh inside a plan": (lambda: ax.Plan(mesh=mesh(data=2)), ["ax.MeshShape", "beside the plan"]),
    "a pipeline and rules that are none": (
        lambda: ax.Plan(pipe="1f1b", partition={"kernel": "tensor"}),
        [
            "pipe='1f1b' must be an ax.Pipelined",
            "partition={'kernel': 'tensor'}: rules are pairs of a regular expression",
        ],
    ),
    "arrays for flags and choices": (
        lambda: ax.Plan(broadcast_buffers=np.ones(3), remat=np.ones(2), update=np.zeros(2)),
        ["broadcast_buffers=array(", "remat=array(", "update=array("],
    ),
    "a stage with a point": (lambda: ax.Shard(stage=2.0), ["stage=2.0 must be 1, 2 or 3"]),
    "rotary positions without a base": (
        lambda: ax.TensorParallelAttention(8, 2, rope_theta=0.0, rngs=nnx.Rngs(0)),
        ["rope_theta=0.0 must be positive, or None"],
    ),
    "rotary positions of latents": (
        lambda: LatentAttention(8, 2, latent=LatentConfig(kv_rank=4), rope_theta=-1.0, rngs=nnx.Rngs(0)),
        ["rope_theta=-1.0 must be positive"],
    ),
    "dropout that draws from nothing": (
        lambda: ax.ParallelDropout(0.5, dim=-2, rngs=None)(jnp.ones((2, 3))),
        ["ParallelDropout: a rate of 0.5 draws masks", "give rngs="],
    ),
    "an array for a stage": (lambda: ax.Shard(stage=np.ones(3), wire=np.ones(2)), ["stage=array(", "wire=array("]),
    "a number for the paths of stages": (lambda: ax.Pipelined(split=3), ["split=3", "module paths"]),
    "a structure for a dtype": (lambda: ax.Precision(param={"a": 1}), ["param={'a': 1} is not a dtype"]),
    "an own axis of a pipeline that is none": (lambda: ax.Plan(axes={"pipe": 4}), ["pipe=4 must be an ax.Pipelined"]),
}


def trainer(**options):
    given = {"tx": optax.sgd(0.1), "loss_fn": mean_loss} | options
    return ddp().trainer(given.pop("tx"), given.pop("loss_fn"), **given)


TRAINERS = {
    "clipping to zero": (lambda: trainer(max_grad_norm=0), ["max_grad_norm=0", "positive", "None does not clip"]),
    "clipping to text": (lambda: trainer(max_grad_norm="1"), ["max_grad_norm='1'", "positive"]),
    "no microbatch in a trainer": (lambda: trainer(accumulate=0), ["accumulate=0", "positive whole number"]),
    "callbacks that are none": (lambda: trainer(callbacks=3), ["callbacks=3", "a list of ax.Callback"]),
    "norms of layers by a text": (lambda: trainer(layer_norms="no"), ["layer_norms='no'", "True or False"]),
    "no loss function": (lambda: trainer(loss_fn=None), ["loss_fn=None", "loss_fn(model, batch)"]),
    "no optimizer": (lambda: trainer(tx=None), ["optax.GradientTransformation", "NoneType"]),
    "gradients of no loss function": (lambda: ddp().value_and_grad(3)(BATCH), ["loss_fn=3", "cannot be called"]),
}


class WholeNumbers(nnx.Module):
    """A parameter of integers and one of flags beside those that train."""

    def __init__(self):
        self.layers = nnx.List([nnx.Linear(5, 5, rngs=nnx.Rngs(seed)) for seed in range(2)])
        self.order, self.keep = nnx.Param(jnp.arange(5)[::-1]), nnx.Param(jnp.ones(5, bool))

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x[:, self.order[...]] * self.keep[...]


class LinenWholeNumbers(linen.Module):
    @linen.compact
    def __call__(self, x):
        for _ in range(2):
            x = linen.Dense(5)(x)
        order = self.param("order", lambda key: jnp.arange(5)[::-1])
        return x[:, order] * self.param("keep", lambda key: jnp.ones(5, bool))


FACADES = {
    "ddp": (ax.DDP, {"data": 2}, {}),
    "zero1": (ax.FSDP, {"fsdp": 2}, {"sharding_strategy": "shard_optimizer"}),
    "zero3": (ax.FSDP, {"fsdp": 2}, {}),
    "hybrid": (ax.FSDP, {"data": 2, "fsdp": 2}, {}),
    "pipeline": (ax.Pipeline, {"data": 2, "pipe": 2}, {"num_microbatches": 2}),
}


def squares(model, batch):
    return jnp.mean(model(batch["x"]) ** 2)


@pytest.mark.parametrize("kind", ["nnx", "linen"])
@pytest.mark.parametrize("facade", FACADES)
def test_trained_parameters_without_gradients_are_all_named_and_the_remedy_works(facade, kind):
    wrap, degrees, options = FACADES[facade]
    if kind == "linen":
        model = LinenWholeNumbers()
        options = options | {"params": model.init(jax.random.key(0), BATCH["x"])}
    else:
        model = WholeNumbers()
    whole = wrap(model, mesh(**degrees), **options)
    whole(BATCH["x"])
    words = ["keep: bool", "order: int", "trainable=lambda name: name not in ['keep', 'order']"]
    check(lambda: whole.trainer(optax.sgd(0.1), squares), words, allowed=64)
    check(lambda: whole.value_and_grad(squares)(BATCH), words, allowed=64)
    floats = wrap(model, mesh(**degrees), trainable=lambda name: name not in ["keep", "order"], **options)
    assert np.isfinite(floats.trainer(optax.sgd(0.1), squares).step(BATCH)["loss"])


def on_the_mesh():
    return sum(len(array.sharding.device_set) > 1 for array in jax.live_arrays())


def check(call, words, allowed=0):
    before = on_the_mesh()
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"
    assert on_the_mesh() - before <= allowed, "something was allocated"  # frames of the error keep it alive


@pytest.mark.parametrize("what", MESHES | MODELS | OPTIONS)
def test_a_model_that_cannot_work_is_refused_before_anything_is_allocated(what):
    check(*(MESHES | MODELS | OPTIONS)[what])


@pytest.mark.parametrize("what", TRAINERS)
def test_a_trainer_that_cannot_work_is_refused_before_its_state_is_allocated(what):
    check(*TRAINERS[what], allowed=len(jax.tree.leaves(ddp().variables)))


BATCHES = {
    "too few rows": (regression(7), ["2 batch shards", "x: shape (7, 5)", "w: shape (7,)", "use 6 or 8 rows"]),
    "no leaves": ({}, ["no array with a batch dim: it has no leaves", "dim 0 holds the rows"]),
    "no rows": (regression(0), ["the batch is empty", "x: shape (0, 5)", "skip it"]),
    "one leaf that does not divide": (
        {**BATCH, "y": BATCH["y"][:7]},
        ["differ in the size of dim 0", "y: shape (7, 3)"],
    ),
    "an array without rows": (
        {**BATCH, "classes": np.ones(3)},
        [
            "differ in the size of dim 0",
            "classes: shape (3,)",
            "x: shape (8, 5)",
            "a constant from the first step on",
        ],
    ),
    "masked values": (
        {**BATCH, "x": np.ma.masked_greater(BATCH["x"], 0.5)},
        ["x: masked values", "leaf.filled(value)", "np.ma.getmaskarray(leaf)"],
    ),
    "a dtype that JAX has not": ({**BATCH, "x": np.ones((8, 5), np.longdouble)}, [f"x: {np.dtype(np.longdouble)}"]),
    "fields": ({**BATCH, "x": np.zeros(8, [("a", "i4")])}, ["x: [('a', '<i4')]"]),
    "leaves that differ": (
        {**BATCH, "y": BATCH["y"][:4]},
        ["differ in the size of dim 0", "x: shape (8, 5)", "(4, 3)"],
    ),
    "scalars only": ({"scale": np.float64(1.0)}, ["no array with a batch dim", "scale'"]),
    "nothing": (None, ["no array with a batch dim: it has no leaves"]),
    "texts": ({**BATCH, "name": np.array(["a"] * 8)}, ["name: <U1", "encode them as numbers, or leave them out"]),
    "many texts": ({f"n{i}": np.array(["a"] * 8) for i in range(64)}, ["<U1 and 59 more"]),
    "objects": ({**BATCH, "name": np.array([None] * 8)}, ["name: objects (NoneType)", "cannot hold"]),
}
USES = {
    "step": lambda model, batch: model.trainer(optax.sgd(0.1), mean_loss).step(batch),
    "evaluate": lambda model, batch: model.trainer(optax.sgd(0.1), mean_loss).evaluate(batch),
    "value_and_grad": lambda model, batch: model.value_and_grad(mean_loss)(batch),
    "forward": lambda model, batch: model(batch),
}


@pytest.fixture(scope="module")
def model():
    return ddp()


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("what", BATCHES)
def test_a_batch_that_cannot_be_split_is_refused_wherever_it_is_given(model, what, use):
    batch, words = BATCHES[what]
    if use == "evaluate" and what == "too few rows":  # any number of rows is taken
        return
    with pytest.raises((ValueError, TypeError)) as caught:
        USES[use](model, batch)
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


@pytest.mark.parametrize("what", ["one leaf that does not divide", "an array without rows", "no rows"])
def test_leaves_that_differ_and_batches_without_rows_are_not_called_uneven(model, what):
    with pytest.raises(ValueError) as caught:
        USES["step"](model, BATCHES[what][0])
    assert not any(words in str(caught.value) for words in ("split evenly", "multiple of 1", "1 rows"))


@pytest.mark.parametrize("use", USES)
def test_whole_numbers_that_32_bits_have_not_are_refused_where_JAX_has_no_more(use):
    wide = {"id": np.arange(8) + 2**31 - 4, "key": np.full(8, 2**32, np.uint64), "low": np.int64(-(2**40))}
    words = [
        "id: int64 from 2147483644 to 2147483651, which do not fit int32",
        "key: uint64",
        "low: int64",
        "x64",
    ]
    with jax.enable_x64(False):
        small = ddp(model=nnx.Linear(5, 3, rngs=nnx.Rngs(0)))
        check(lambda: USES[use](small, BATCH | wide), words, allowed=16)
        fit = BATCH | {"id": np.arange(8) - 2**31, "x": BATCH["x"].astype(">f8")}  # and the other byte order is read
        if use == "evaluate":
            assert USES[use](small, fit)["loss"] == USES[use](small, BATCH)["loss"]


def test_a_masked_array_that_masks_nothing_is_a_plain_one():
    np.testing.assert_array_equal(ddp()(np.ma.masked_array(BATCH["x"])), ddp()(BATCH["x"]))


def test_microbatches_count_in_what_must_divide(model):
    with pytest.raises(
        ValueError, match=r"2 batch shards .* x 3 microbatches = 6 parts(.|\n)*use 6 or 12 rows, another number"
    ):
        model.trainer(optax.sgd(0.1), mean_loss, accumulate=3).step(BATCH)


@pytest.mark.parametrize("strategy", ["overlapped", "synchronous"])
def test_typed_mode_refuses_a_hook_whose_result_may_differ_from_rank_to_rank(strategy):
    for hook, works in ((jax.lax.psum, True), (ax.all_reduce_sum, False)):
        model = ddp(comm_hook=hook, check_vma=True, sync_strategy=strategy)
        if works:
            assert model.value_and_grad(mean_loss)(BATCH)[0][0].shape == ()
        else:
            with pytest.raises(
                ValueError, match=r"comm_hook=<function all_reduce_sum.*jax.lax.psum, or use check_vma=False"
            ):
                model.value_and_grad(mean_loss)(BATCH)


@pytest.mark.parametrize("use", USES)
def test_typed_mode_names_the_loop_that_starts_from_plain_zeros(use):
    recurrent = ax.DDP(CASES["recurrent"].model(), mesh(data=2), check_vma=True)
    batch = BATCH["x"] if use == "forward" else BATCH
    with pytest.raises(
        ValueError, match=r"the loop at .*plan_models.py:\d+ \(in __call__\).*check_vma=False.*zeros_like"
    ):
        USES[use](recurrent, batch)


def test_a_broken_model_is_the_users_own_error(model):
    def loss_fn(model, batch):
        return jnp.mean(model(batch["x"].T))

    with pytest.raises(TypeError, match="dot_general"):
        model.value_and_grad(loss_fn)(BATCH)
