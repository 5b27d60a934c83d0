"""Canaries: assumptions about JAX, each with a small program that tries it; `python -m axonml_jax.compat` runs all."""

import functools
import inspect
import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import numpy as np
from flax import linen
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from axonml_jax.compat import jaxpr, versions
from axonml_jax.compat.jaxpr import Operation, live, opened, parsed
from axonml_jax.compat.order import (
    Saveable,
    SaveWhere,
    after,
    axis_not_found,
    bernoulli_at,
    current_trace,
    manual_axes,
    no_mesh_around,
    noting_lacked_streams,
    platform_around,
    reduce_without_constraints,
    refuses_placement,
    standing_for,
    together,
    trace_settings,
    vjp_without,
    waiting,
)
from axonml_jax.compat.processes import CoordinatorClient, backend_started, keep_in_every_process, let_gloo_listen_on
from axonml_jax.compat.row_keys import row_key
from axonml_jax.compat.splash import SplashCall, SplashPiece, Visits, splash_backward, splash_forward
from axonml_jax.compat.varying_types import CASTS, cast_to_varying, varying_axes

# --------------------------------------------------------------------------------------------------
# Canaries: small programs that fail loudly where a change in JAX would otherwise be silent.
# --------------------------------------------------------------------------------------------------


class CanaryError(RuntimeError):
    """Raised where JAX no longer does what the library relies on.

    Attributes:
      found: what it does instead.
    """

    def __init__(self, found: str, text: str | None = None):
        super().__init__(text or found)
        self.found = found


@dataclass(frozen=True)
class Canary:
    """One assumption about JAX that it does not promise, and whose failure nothing else would report.

    Attributes:
      name: what is assumed, in a few words.
      relies: what the library relies on, a sentence.
      otherwise: what would silently go wrong, a sentence.
      probe: tries it; raises `CanaryError` with what was found (`expect`), or another error.
    """

    name: str
    relies: str
    otherwise: str
    probe: Callable[[], None]

    def check(self) -> None:
        """Tries it on the JAX that is installed.

        Raises:
          CanaryError: with what was found, what was relied on, and what would go wrong.
        """
        try:
            self.probe()
        except Exception as error:
            found = error.found if isinstance(error, CanaryError) else f"{type(error).__name__}: {error}"
            raise CanaryError(
                found,
                f"jax {jax.__version__}: {self.name}: {found}. The library relies on this: {self.relies} Otherwise: "
                f"{self.otherwise} `python -m axonml_jax.compat` tries everything that it relies on.",
            ) from error


def expect(holds: bool, found: str) -> None:
    """Raises `CanaryError` with what was found, unless it holds."""
    if not holds:
        raise CanaryError(found)


# --------------------------------------------------------------------------------------------------
# Tracing over an abstract mesh of two ranks, which needs no devices; most canaries use it.
# --------------------------------------------------------------------------------------------------

AXIS = "canary"
SPLIT, WHOLE = PartitionSpec(AXIS), PartitionSpec()
MESH = AbstractMesh((2,), (AXIS,), axis_types=(AxisType.Auto,))


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    """The shape of a float32 array."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def on_two(
    fun: Callable[..., Any], *specs: PartitionSpec, check_vma: bool, out: PartitionSpec = SPLIT
) -> Callable[..., Any]:
    """`fun` inside `shard_map` over two ranks, one spec per argument."""
    return jax.shard_map(fun, mesh=MESH, in_specs=specs, out_specs=out, check_vma=check_vma)


def operations(fun: Callable[..., Any], *args: jax.ShapeDtypeStruct) -> list[Operation]:
    """The operations that a function traces to."""
    return [Operation(eqn) for eqn in opened(jax.make_jaxpr(fun)(*args)).equations]


def body_of(fun: Callable[..., Any], *args: jax.ShapeDtypeStruct) -> list[Operation]:
    """The operations inside the one `shard_map` that a function consists of."""
    (outer,) = operations(fun, *args)
    mapped = outer.mapped
    expect(mapped is not None, f"a shard_map traces to {outer.name}")
    return [Operation(eqn) for eqn in opened(mapped.body).equations] if mapped else []


def names(found: list[Operation]) -> list[str]:
    """The names of the operations' primitives."""
    return [operation.name for operation in found]


# --------------------------------------------------------------------------------------------------
# Canary about `splash.py`: what the kernel makes of positions, tables of blocks, and a log-sum-exp of other pieces.
# --------------------------------------------------------------------------------------------------

_BLOCK, _HEAD_SIZE = 128, 8


def _pieces() -> None:
    """Checks attention of queries at 3, 5, 7, ... in two pieces, of keys 0 to 127 and 128 to 255, against plain attention."""
    rng = np.random.default_rng(0)
    q, k, v, grad = (rng.normal(size=(1, 1, n * _BLOCK, _HEAD_SIZE)).astype("float32") for n in (1, 2, 2, 1))
    at = 3 + 2 * np.arange(_BLOCK, dtype="int32")
    seen = np.arange(2 * _BLOCK)[None] <= at[:, None]
    with jax.enable_x64(False):
        wanted = _plain(seen, q, k, v, grad)
        got = jax.jit(_by_pieces)(q, k, v, at, grad)
        for name, own, right in zip(("result", "gradient of q", "of k", "of v"), got, wanted, strict=True):
            expect(bool(np.allclose(own, right, atol=1e-4)), f"the {name} of attention in two pieces is another one")


def _plain(seen: Any, q: Any, k: Any, v: Any, grad: Any) -> tuple[Any, ...]:
    def attend(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.softmax(jnp.where(seen, q @ k.swapaxes(2, 3), -jnp.inf), -1) @ v

    out, undo = jax.vjp(attend, q, k, v)
    return out, *undo(grad)


def _by_pieces(q: Any, k: Any, v: Any, at: Any, grad: Any) -> tuple[Any, ...]:
    call, one = SplashCall(_BLOCK, _BLOCK, after=0, interpret=True), jnp.zeros((1, 1), jnp.int32)
    visits = Visits((one, one == 0), (one, one == 0))
    half = lambda x, i: x[:, :, i * _BLOCK : (i + 1) * _BLOCK]
    pieces = [SplashPiece(q, half(k, i), half(v, i), at - i * _BLOCK, None, visits) for i in range(2)]
    (out, lse), (other, more) = (splash_forward(call, piece) for piece in pieces)
    total = jnp.logaddexp(lse, more)
    out = out * jnp.exp(lse - total)[..., None] + other * jnp.exp(more - total)[..., None]
    parts = [splash_backward(call, piece, total, (out * grad).sum(-1), grad) for piece in pieces]
    (dq, *_), (more, *_) = parts
    return out, dq + more, *(jnp.concatenate([parts[0][i], parts[1][i]], 2) for i in (1, 2))


PIECES_BY_SPLASH_CANARIES = (
    Canary(
        "splash attention in pieces",
        "The kernel compares keys with the positions given, visits the blocks named, and takes a log-sum-exp from outside.",
        "Attention across ranks on TPUs reads keys that it must not see, or its gradients are those of other weights.",
        _pieces,
    ),
)


# --------------------------------------------------------------------------------------------------
# Canary about `triton.py`: JAX has announced that Pallas's Triton backend goes.
# --------------------------------------------------------------------------------------------------


def _triton() -> None:
    import warnings

    from axonml_jax.compat.triton import exp, kernel_call, load, store

    def kernel(x, y, *, interpret):
        place, inside = jnp.arange(8, dtype=jnp.int32), jnp.arange(8) < 5
        store(y, place, exp(load(x, place, inside), jnp.float32(1), interpret), inside)

    def run(x, interpret=False):
        one = functools.partial(kernel, interpret=interpret)
        return kernel_call(one, [((8,), x.dtype)], (1,), [x], name="probe", warps=1, interpret=interpret)[0]

    x = jnp.arange(8, dtype=jnp.float32)
    expect(np.allclose(run(x, True)[:5], np.exp(x[:5] - 1), rtol=1e-5), "an interpreted kernel computes something else")
    gpu = jax.sharding.AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")  # pyright: ignore
    mesh = AbstractMesh((1,), ("one",), (AxisType.Auto,), abstract_device=gpu)  # pyright: ignore[reportCallIssue]
    with jax.sharding.use_abstract_mesh(mesh), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        text = jax.jit(run).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    expect("__gpu$xla.gpu.triton" in text, "a kernel is lowered for CUDA to something else")


TRITON_CANARIES = (
    Canary(
        "kernels in Triton",
        "Pallas runs a kernel of masked loads and stores by plain operations, and lowers it for CUDA by its Triton backend.",
        "Models on NVIDIA GPUs do not build, but for plans with kernels='xla'.",
        _triton,
    ),
)


# --------------------------------------------------------------------------------------------------
# Canaries about `compat/processes.py`: how processes start and meet, and the compiled programs that they keep.
# --------------------------------------------------------------------------------------------------

_SECOND = 1000


@contextmanager
def _alone() -> Iterator[CoordinatorClient]:
    """Yields a client of a coordinator of one process."""
    from jax._src import distributed
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    expect(hasattr(distributed.global_state, "client"), "jax.distributed's state has no client")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    service = _jax.get_distributed_runtime_service(address, 1)
    client = _jax.get_distributed_runtime_client(address, 0, init_timeout=10, shutdown_on_destruction=False)
    client.connect()
    try:
        yield client
    finally:
        client.shutdown()
        service.shutdown()


def _coordinator() -> None:
    with _alone() as client:
        client.key_value_set("canary/a", "1")
        client.key_value_set("canary/a", "2", allow_overwrite=True)
        expect(_refused(lambda: client.key_value_set("canary/a", "3")), "a key is set twice without a word")
        counts = [client.key_value_increment("canary/n", by) for by in (1, 2)]
        expect(counts == [1, 3], f"counting 1 and 2 more gives {counts}")
        held = dict(client.key_value_dir_get("canary/"))
        expect(held == {"canary/a": "2", "canary/n": "3"}, f"a folder of two keys holds {held}")
        expect(
            client.blocking_key_value_get("canary/a", _SECOND) == "2",
            "a key that is set is not found by waiting for it",
        )
        expect(_refused(lambda: client.blocking_key_value_get("canary/b", 1)), "a key that is not set is found")
        client.key_value_delete("canary/a")
        expect(len(client.key_value_dir_get("canary/")) == 1, "a deleted key is still there")
        client.wait_at_barrier("canary", _SECOND)
        client.wait_at_barrier("canary of some", _SECOND, [0])


def _refused(call: Any) -> bool:
    try:
        call()
    except jax.errors.JaxRuntimeError:
        return True
    return False


def _gloo() -> None:
    from jax._src import distributed, xla_bridge
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    class Asked(Exception):
        pass

    asked: list[dict[str, Any]] = []

    def make(**given: Any) -> None:
        asked.append(given)
        raise Asked

    state, flag = distributed.global_state, "jax_cpu_collectives_implementation"
    made, client, chosen = _jax.make_gloo_tcp_collectives, state.client, getattr(jax.config, flag)
    expect("hostname" in str(made.__doc__) and "interface" in str(made.__doc__), f"gloo's maker takes {made.__doc__}")
    try:
        _jax.make_gloo_tcp_collectives, state.client = make, "client"
        jax.config.update(flag, "gloo")
        let_gloo_listen_on(hostname="canary")
        xla_bridge.make_cpu_client()
    except Asked:
        expect(asked[0].get("hostname") == "canary", f"JAX's CPU client makes gloo's collectives with {asked}")
    finally:
        _jax.make_gloo_tcp_collectives, state.client = made, client
        jax.config.update(flag, chosen)
    expect(bool(asked), "JAX's CPU client does not ask for gloo's collectives where we answer")


def _written_by_any() -> None:
    from jax._src import compilation_cache, compiler, distributed

    written: list[str] = []
    cpu, usual, state = jax.local_devices(backend="cpu")[0].client, compiler._cache_write, distributed.global_state
    put, process = compilation_cache.put_executable_and_time, state.process_id
    try:
        compilation_cache.put_executable_and_time = lambda key, *rest: written.append(key)
        state.process_id = 1
        keep_in_every_process()
        given: dict[str, Any] = {"cache_key": "canary", "compile_time_secs": 1e6, "module_name": "", "backend": cpu}
        given |= {"executable": None, "host_callbacks": []}
        takes = inspect.signature(compiler._cache_write).parameters  # jax 0.10 is told of callbacks too
        compiler._cache_write(**{name: given[name] for name in takes})
    finally:
        compilation_cache.put_executable_and_time, state.process_id = put, process
        compiler._cache_write = usual
    called = compiler._compile_and_write_cache.__code__.co_names
    expect("_cache_write" in called, f"what compiles and writes calls {called}")
    expect(written == ["canary"], f"process 1 has written {written}")


def _started() -> None:
    jax.devices()
    expect(backend_started(), "JAX has devices and says that no backend has started")


def _threads() -> None:
    asked, threads = os.environ.get("NPROC", ""), Path("/proc/self/task")
    if jax.devices()[0].platform != "cpu" or not asked or not threads.exists():
        return  # no simulated devices, or no way to see threads
    pool = [thread for thread in threads.glob("*/comm") if _name(thread).startswith("tf_XLAEigen")]
    expect(len(pool) >= int(asked), f"with NPROC={asked} XLA:CPU has {len(pool)} threads in its pool")


def _name(thread: Path) -> str:
    try:
        return thread.read_text()
    except OSError:
        return ""  # it has just ended


PROCESSES_CANARIES = (
    Canary(
        "the coordinator's store",
        "The client of jax.distributed sets, counts, lists, waits for and deletes keys, and meets at barriers.",
        "Processes miss each other's word: a watchdog that hears nothing, checkpoints that wait in vain.",
        _coordinator,
    ),
    Canary(
        "where gloo listens",
        "JAX's CPU client calls make_gloo_tcp_collectives in jaxlib's module, which takes a host name or an interface.",
        "CPU processes of several machines cannot reach each other.",
        _gloo,
    ),
    Canary(
        "compiled programs of all processes",
        "JAX writes what it has compiled by `_cache_write` of its compiler, which asks whether this is process 0.",
        "CPU processes but the first compile everything anew at every start.",
        _written_by_any,
    ),
    Canary(
        "whether a backend has started",
        "JAX knows whether it has started a backend without starting one.",
        "Simulated devices are asked for too late, and are not there.",
        _started,
    ),
    Canary(
        "threads of simulated devices",
        "The environment variable NPROC sizes XLA:CPU's pool of threads when the backend starts (seen on Linux only).",
        "Simulated devices wait for each other for ever on machines with few cores.",
        _threads,
    ),
)


# --------------------------------------------------------------------------------------------------
# Canaries about random numbers: the bits of an element depend on its index alone, and modules ask for streams.
# --------------------------------------------------------------------------------------------------


def _elements() -> None:
    key, shape = jax.random.key(1), (3, 4, 5)
    whole = np.asarray(jax.random.bernoulli(key, 0.3, shape)).ravel()
    index = jnp.asarray([59, 0, 17, 17, 31, 8], jnp.uint32)
    drawn = np.asarray(bernoulli_at(key, 0.3, jnp.zeros_like(index), index))
    expect(bool((drawn == whole[np.asarray(index)]).all()), f"single elements are drawn as {drawn}")


def _rows() -> None:
    key, shape = jax.random.key(1), (3, 4, 5)
    # Bits: what is computed from them may differ in the last place, as processors compute whole vectors and what is left.
    whole = np.asarray(jax.random.bits(key, shape))
    parts = [np.asarray(jax.random.bits(row_key(key, part, 2, 2), (3, 2, 5))) for part in range(2)]
    expect(np.array_equal(np.concatenate(parts, 1), whole), f"parts of rows are drawn as {parts}")
    keys = [np.asarray(jax.random.key_data(jax.random.split(row_key(key, part, 2, 2)))) for part in range(2)]
    wanted = np.asarray(jax.random.key_data(jax.random.split(key, 4)))
    expect(np.array_equal(np.concatenate(keys)[:, :2], wanted), f"keys of rows are made as {keys}")


def _streams() -> None:
    found: set[str] = set()
    with noting_lacked_streams(found):
        drop = linen.jit(linen.Dropout)(0.5, rng_collection="canary", deterministic=False)
        drop.apply({}, jnp.ones(2), rngs={"params": jax.random.key(0)})
    expect(found == {"canary"}, f"a module that draws of a stream that is not there asks for {found}")


RANDOM_ELEMENTS_CANARIES = (
    Canary(
        "elements are drawn alone",
        "threefry's bits of an element of an array are a function of the key and the element's index in the flat array.",
        "Ranks that share the weights of one attention drop others than one device does.",
        _elements,
    ),
    Canary(
        "rows are drawn alone",
        "Threefry makes the bits, and the keys, of an index of the whole draw of the key and that index.",
        'Masks under `draws="rows"` are not those of one device.',
        _rows,
    ),
    Canary(
        "streams of Linen modules",
        "Flax asks `Scope.has_rng` for every random stream that a module draws of.",
        "Noise of a Linen model's own streams is the same in all steps of a scan, and `has_rng` is False.",
        _streams,
    ),
)


# --------------------------------------------------------------------------------------------------
# Canaries about `compat/order.py`: what a backward recomputes.
# --------------------------------------------------------------------------------------------------

_EXPENSIVE = frozenset(
    ("dot_general", "reduce_sum", "gather", "random_bits", "gt", "slice", "dynamic_slice", "fft", "name", "sin")
)
_SUMS = frozenset(("psum", "psum_invariant"))


def _model(w: Any, x: Any) -> Any:
    y = jax.ad_checkpoint.checkpoint_name(jnp.sin(x @ w), "canary")
    y = jnp.where(y > 0, y, 2 * y) + jax.lax.psum(jnp.sum(y, axis=0), AXIS)
    y = y * jax.random.bits(jax.random.key(0), y.shape).astype(y.dtype) + jnp.abs(jnp.fft.fft(y))
    first = jnp.argmax(y[0])
    return (
        jnp.sum(y[:2] ** 2)
        + jnp.sum(jax.lax.dynamic_slice(y, (0, first), (1, 1)) ** 2)
        + jnp.sum(w[jnp.arange(2)] ** 2)
    )


def _asked() -> dict[str, Saveable]:
    """By primitive, the first result that a policy is asked about."""
    asked: dict[str, Saveable] = {}

    def saves(result: Saveable) -> bool:
        return asked.setdefault(result.primitive, result) is not None

    loss = jax.checkpoint(_model, policy=SaveWhere(saves))
    grad = lambda w, x: jax.grad(loss)(w, x)
    jax.make_jaxpr(on_two(grad, WHOLE, SPLIT, check_vma=False, out=WHOLE))(floats(4, 4), floats(8, 4))
    return asked


def _everything() -> None:
    asked = _asked()
    missing = sorted(_EXPENSIVE - set(asked)) + ["psum"] * (not _SUMS & set(asked))
    expect(not missing, f"jax.checkpoint asks its policy about {sorted(asked)} only, and does these again: {missing}")


def _arguments() -> None:
    asked = _asked()
    product = asked["dot_general"].operands
    expect(
        [getattr(each, "shape", None) for each in product] == [(4, 4), (4, 4)] and product[0].dtype == jnp.float32,
        f"of a product a policy is told the operands {product}",
    )
    wanted = {
        "slice": {"start_indices", "limit_indices"},
        "dynamic_slice": {"slice_sizes"},
        "fft": {"fft_type"},
        "dot_general": {"dimension_numbers"},
    }
    missing = sorted((set(wanted) | {"name"}) - set(asked))
    expect(not missing, f"a policy is not asked about {missing}")
    for primitive, params in wanted.items():
        found = asked[primitive].params
        expect(params <= set(found), f"of {primitive} a policy is told {sorted(found)}, not {sorted(params)}")
    expect(asked["name"].given_name == "canary", f"of a name a policy is told {dict(asked['name'].params)}")


def _saved() -> None:
    def residuals(saves: bool) -> int:
        policy = SaveWhere(lambda result: result.primitive == "reduce_sum" and saves)
        fun = jax.checkpoint(lambda x: jnp.sin(jnp.sin(jnp.sum(x, axis=1))), policy=policy)
        counts = []
        jax.make_jaxpr(lambda x: counts.append(jax.tree.leaves(jax.vjp(fun, x)[1])) or x)(floats(5, 3))
        return sum(leaf.shape == (5,) for leaf in counts[0])

    found = residuals(True), residuals(False)
    expect(found == (1, 0), f"of a sum that a policy saves, and one that it does not, residuals: {found}, not (1, 0)")


ASKED_POLICIES_CANARIES = (
    Canary(
        "policies are asked about everything",
        "A callable policy of jax.checkpoint is asked about every operation, products or not.",
        "Sums, lookups, dropout's bits and collectives are done again in the backward of scans and pipelines.",
        _everything,
    ),
    Canary(
        "what policies are told",
        "A policy gets the primitive, abstract operands and parameters under the names we read, those of checkpoint_name too.",
        "The wrong results are kept: the backward's memory or time grows.",
        _arguments,
    ),
    Canary(
        "policies are obeyed",
        "What a policy saves is a residual, what it does not save is none.",
        "Activations are kept that should be computed again, or computed again although they are kept.",
        _saved,
    ),
)


# --------------------------------------------------------------------------------------------------
# Canaries about `compat/order.py`: without barriers results stay right, and memory and overlap are lost.
# --------------------------------------------------------------------------------------------------


def _lowered_barriers() -> None:
    text = jax.jit(lambda x, y: after(jnp.sin(x), jnp.cos(y))).lower(floats(2), floats(3)).as_text()
    module = parsed(text)  # alive while it is read
    main = next(op.operation for op in module.body if op.operation.name == "func.func")
    found = {op.operation.name: op.operation for op in main.regions[0].blocks[0]}
    barrier = found.get("stablehlo.optimization_barrier")
    if barrier is None:
        expect(False, f"no barrier is left in the lowered program: {list(found)}")
    else:
        tied = [str(value.owner.name) for value in barrier.operands]
        expect(
            tied == ["stablehlo.sine", "stablehlo.cosine"],
            f"a value that waits for another one, which nothing else reads, is tied to {tied}",
        )


def _typed_barrier() -> None:
    seen: dict[str, frozenset[str]] = {}

    def look(x: Any, w: Any) -> Any:
        x, w = together((x, w))
        seen["what varied"], seen["what did not"] = varying_axes(x), varying_axes(w)
        return x

    jax.make_jaxpr(on_two(look, SPLIT, WHOLE, check_vma=True))(floats(2), floats(1))
    wanted = {"what varied": {AXIS}, "what did not": {AXIS} if versions.BARRIERS_JOIN_TYPES else set()}
    expect(seen == wanted, f"behind a barrier these vary: {seen}, expected {wanted}")


def _compiled_barriers() -> None:
    def twice(x: Any, y: Any) -> Any:
        first = jnp.tanh(x @ x)
        again, y = together((x, first @ y))
        return jnp.tanh(again @ again) @ y

    options = versions.CPU_BARRIER_OPTIONS
    text = jax.jit(twice, compiler_options=options).lower(floats(64, 64), floats(64, 64)).compile().as_text()
    count = sum(" tanh(" in line for line in str(text).splitlines())
    expect(count == 2, f"the same is computed before and behind a barrier: the compiled program does it {count} times")


BARRIERS_CANARIES = (
    Canary(
        "barriers are lowered",
        "optimization_barrier reaches StableHLO with every operand, those too whose results nobody reads.",
        "Weights are gathered, and offloaded arrays loaded, all at once at the start of a step: ZeRO-3's memory is lost.",
        _lowered_barriers,
    ),
    Canary(
        "types behind a barrier",
        "Before jax 0.11 a barrier types its results as varying over what any operand varies over; later it changes no type.",
        "Reduced gradients are typed as varying, or one barrier ties what has to be tied apart.",
        _typed_barrier,
    ),
    Canary(
        "barriers are compiled",
        "XLA:CPU, with the options that versions.py gives it, does not merge equal operations across a barrier.",
        "A unit gathered again in the backward is merged with the forward's and kept: ZeRO-3's memory is lost.",
        _compiled_barriers,
    ),
)


# --------------------------------------------------------------------------------------------------
# Canaries about collectives: what they are called in a traced program, their gradients, and how they are lowered.
# --------------------------------------------------------------------------------------------------

KNOWN: dict[str, tuple[frozenset[str], Callable[[Any], Any]]] = {
    "a sum": (frozenset({"psum", "psum_invariant"}), lambda x: x + jax.lax.psum(x, AXIS)),
    "a maximum": (frozenset({"pmax"}), lambda x: x + jax.lax.pmax(x, AXIS)),
    "a minimum": (frozenset({"pmin"}), lambda x: x + jax.lax.pmin(x, AXIS)),
    "a gather": (frozenset({"all_gather"}), lambda x: jax.lax.all_gather(x, AXIS, tiled=True)),
    "a summed scatter": (frozenset({"reduce_scatter"}), lambda x: jax.lax.psum_scatter(x, AXIS, tiled=True)),
    "an exchange": (frozenset({"all_to_all"}), lambda x: jax.lax.all_to_all(x, AXIS, 0, 0, tiled=True)),
    "a permute": (frozenset({"ppermute"}), lambda x: jax.lax.ppermute(x, AXIS, [(0, 1)])),
}
"""Names of the primitives that each collective may trace to, and how to trace one."""


def _named() -> None:
    for check_vma in (True, False):
        for what, (known, call) in KNOWN.items():
            found = body_of(on_two(call, SPLIT, check_vma=check_vma), floats(4))
            ours = [operation for operation in found if operation.name in known]
            expect(
                len(ours) == 1,
                f"with check_vma={check_vma} {what} traces to {names(found)}, not to one of {sorted(known)}",
            )
            expect(
                ours[0].mesh_axes == (AXIS,), f"{what} names the axes {ours[0].mesh_axes} in {sorted(ours[0].options)}"
            )


def _transposed() -> None:
    for check_vma in (True, False):
        grad = jax.grad(lambda w: jnp.sum(jnp.sin(jax.lax.all_gather(w, AXIS, tiled=True))))
        found = set(names(body_of(on_two(grad, SPLIT, check_vma=check_vma), floats(4)))) & {
            "reduce_scatter",
            *KNOWN["a sum"][0],
        }
        expect(found == {"reduce_scatter"}, f"with check_vma={check_vma} the gradient of a gather is a {sorted(found)}")


def _positions() -> None:
    mesh = AbstractMesh((2, 3), ("slow", "fast"), axis_types=(AxisType.Auto,) * 2)
    axes, spec = ("slow", "fast"), PartitionSpec(("slow", "fast"))
    mapped = jax.shard_map(lambda x: jax.lax.ppermute(x, axes, [(1, 3)]), mesh=mesh, in_specs=spec, out_specs=spec)
    text = jax.jit(mapped).trace(floats(6)).lower(lowering_platforms=("cpu",)).as_text()
    pairs = next((line for line in text.splitlines() if "collective_permute" in line), "no permute")
    expect("[[1, 3]]" in pairs, f"a permute from position 1 to 3 over two axes lowers to {pairs.strip()}")


def _lowered() -> None:
    mapped = on_two(lambda x: x + jax.lax.psum(x, AXIS), SPLIT, check_vma=False)
    module = parsed(jax.jit(mapped).trace(floats(4)).lower(lowering_platforms=("cpu",)).as_text())
    found: list[str] = []

    def walk(op: Any) -> None:
        found.append(op.name)
        if op.name == "stablehlo.all_reduce":
            groups = str(op.attributes["replica_groups"])
            expect(AXIS in groups or "x2x" in groups, f"a sum over two ranks is lowered with the groups {groups}")
        for region in op.regions:
            for block in region:
                for inner in block:
                    walk(inner.operation)

    walk(module.operation)
    expect("stablehlo.all_reduce" in found, f"a lowered sum over the ranks reads as {found}")


def _beside_the_partitioner() -> None:
    reduce_without_constraints()
    calls = {what: KNOWN[what][1] for what in ("a sum", "a maximum", "a minimum", "a summed scatter")}
    calls["an untiled scatter"] = lambda x: jax.lax.psum_scatter(x, AXIS)
    for what, call in calls.items():
        for check_vma in (True, False):
            left, written = (_constraints(call, platform, check_vma) for platform in ("cpu", "tpu"))
            expect(not left, f"{what} of bfloat16 beside an axis of the partitioner has {left} constraints on scalars")
            expect(bool(written), f"JAX lowers {what} without constraints now: compat/order.py is no longer needed")


def _constraints(call: Callable[[Any], Any], platform: str, check_vma: bool) -> int:
    """The number of sharding constraints on scalars in the lowering of a reduction beside an axis of the partitioner."""
    mesh = AbstractMesh((2, 2), (AXIS, "other"), axis_types=(AxisType.Auto,) * 2)
    mapped = jax.shard_map(call, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT, axis_names={AXIS}, check_vma=check_vma)
    traced = jax.jit(mapped).trace(jax.ShapeDtypeStruct((4, 2), jnp.bfloat16))
    lines = traced.lower(lowering_platforms=(platform,)).as_text().splitlines()
    return sum("harding" in line and line.endswith(" tensor<bf16>") for line in lines)


def _loop_error() -> None:
    loop = lambda x: jax.lax.scan(lambda c, each: (c + each, None), jnp.zeros(()), x)[0][None]
    try:
        jax.make_jaxpr(on_two(loop, SPLIT, check_vma=True))(floats(4))
    except TypeError as error:
        said = {word for word in ("carry", "varying") if word in str(error)}
        expect(len(said) == 2, f"JAX's refusal says nothing of carry or varying: {error}")
    else:
        expect(False, "JAX no longer refuses a loop that starts from plain zeros and carries what varies")


COLLECTIVE_NAMES_CANARIES = (
    Canary(
        "names of collectives",
        "Collectives trace to primitives of known names that say their axes as axes or axis_name, in both modes.",
        "The ledger and the plans built on it do not see what is sent.",
        _named,
    ),
    Canary(
        "the gradient of a gather",
        "all_gather transposes to a reduce-scatter, with check_vma on and off.",
        "Whole gradients are reduced on every rank: right results, and ZeRO-2's memory and half its traffic lost.",
        _transposed,
    ),
    Canary(
        "positions over two axes",
        "ppermute over several axes counts positions in the mesh's order, the first axis slowest.",
        "Rings send to the wrong rank.",
        _positions,
    ),
    Canary(
        "lowered collectives",
        "StableHLO can be parsed by jax.interpreters.mlir, and names collectives and their groups.",
        "Holding the ledger against the lowered program finds nothing to compare.",
        _lowered,
    ),
    Canary(
        "words of a refused loop",
        "JAX's TypeError about a loop whose carry changes its varying type says carry and varying.",
        "Users see JAX's own error instead of the loop's line and the remedy.",
        _loop_error,
    ),
    Canary(
        "reductions beside the partitioner",
        "JAX constrains the sharding of the two scalars that are reduced beside axes that XLA partitions; it can be taken out.",
        "XLA:CPU ends the process at sums of bfloat16, or JAX's rules are replaced for nothing.",
        _beside_the_partitioner,
    ),
)


# --------------------------------------------------------------------------------------------------
# Canaries about jaxprs and their equations (`compat/jaxpr.py`), which are read, cut and run again.
# --------------------------------------------------------------------------------------------------


@jax.custom_jvp
def _with_jvp(x: Any) -> Any:
    return jnp.sin(x)


_with_jvp.defjvp(lambda primals, tangents: (_with_jvp(primals[0]), tangents[0]))


@jax.custom_vjp
def _with_vjp(x: Any) -> Any:
    return jnp.sin(x)


_with_vjp.defvjp(lambda x: (_with_vjp(x), x), lambda x, ct: (ct,))


def _program(x: Any) -> Any:
    with jax.named_scope("canary"):
        x = jnp.sin(x) + 1.0
    x = _with_vjp(_with_jvp(jax.jit(lambda x: x * 2)(x)))
    x = jax.checkpoint(jnp.cos)(x)
    total, _ = jax.lax.scan(lambda c, each: (c * each + x[0], None), jnp.float32(1), x)
    x = jax.lax.while_loop(lambda c: c[1] < 3, lambda c: (c[0] * total, c[1] + 1), (x, 0))[0]
    jnp.tan(x)
    return jax.lax.cond(total > 0, jnp.sin, jnp.cos, x)


_VIEWS: dict[str, tuple[Callable[[Operation], Any], int]] = {
    "mere calls": (lambda operation: operation.called, 1),
    "calls": (lambda operation: operation.call, 4),
    "calls under jax.checkpoint": (lambda operation: operation.checkpointed, 1),
    "scans": (lambda operation: operation.scan, 1),
    "while loops": (lambda operation: operation.loop, 1),
    "conditionals": (lambda operation: operation.branches, 1),
}
"""Views of an operation, and how many operations of `_program` have each."""


def _inner() -> None:
    found = operations(_program, floats(4))
    for what, (view, count) in _VIEWS.items():
        read = [operation.name for operation in found if view(operation) is not None]
        expect(
            len(read) == count, f"of the operations {names(found)} these are read as {what}: {read}, expected {count}"
        )
    held = {operation.name: len(operation.bodies) for operation in found if operation.bodies}
    expect(sorted(held.values()) == [1, 1, 1, 1, 1, 2, 2], f"programs inside operations: {held}")
    mapped = operations(on_two(jnp.sin, SPLIT, check_vma=False), floats(2))[0].mapped
    said = mapped and (dict(mapped.axis_sizes), mapped.manual)
    expect(said == ({AXIS: 2}, frozenset({AXIS})), f"a shard_map over two ranks says {said}")


def _scans() -> None:
    found = [operation.scan for operation in operations(_program, floats(4)) if operation.scan]
    sizes = [(scan.num_consts, scan.num_carry, scan.first_scanned) for scan in found]
    expect(sizes == [(1, 1, 2)], f"scans with one constant and one carry say that they have {sizes}")
    expect(found[0].options["length"] == 4, f"a scan of four trips says {dict(found[0].options)}")


def _bound_again() -> None:
    def run(x: Any) -> Any:
        program = opened(jax.make_jaxpr(_program)(floats(4)))
        values = dict(zip(program.inputs, [x], strict=True))
        for operation in map(Operation, program.equations):
            read = [atom.val if isinstance(atom, jaxpr.Literal) else values[atom] for atom in operation.operands]
            values |= zip(operation.results, operation.bind(read), strict=True)
        return values[program.outputs[0]]

    first, again = operations(_program, floats(4)), operations(run, floats(4))
    expect(names(again) == names(first), f"operations that are run again make {names(again)}, not {names(first)}")
    scopes = [(str(a.scopes), str(b.scopes)) for a, b in zip(first, again, strict=True)]
    expect(all(a == b for a, b in scopes), f"name scopes before and after operations were run again: {scopes}")


def _literals() -> None:
    atoms = [atom for operation in operations(lambda x: x + 1.0, floats(4)) for atom in operation.operands]
    found = [isinstance(atom, jaxpr.Literal) for atom in atoms]
    expect(found == [False, True], f"of x + 1.0 these operands are literals: {found}")
    expect(float(atoms[1].val) == 1.0 and atoms[1].aval.shape == (), f"the literal 1.0 reads {atoms[1]}")


def _sources() -> None:
    first = operations(_program, floats(4))[0]
    expect(
        str(first.scopes) == "canary", f"an operation under named_scope('canary') stands under {str(first.scopes)!r}"
    )
    called = [name.rsplit(".", 1)[-1] for name in first.functions]
    expect("_program" in called, f"an operation that _program calls was called by {called}")
    expect("_program" in first.line, f"its line is {first.line!r}")


def _dead_code() -> None:
    traced = jax.make_jaxpr(lambda x: (jnp.tan(x), after(x, jnp.sin(x)))[1])(floats(4))
    left = [Operation(eqn).name for eqn in opened(live(traced)).equations]
    expect(left == ["sin", "optimization_barrier"], f"of tan, sin and a barrier that waits for sin are left {left}")


def _effects() -> None:
    printing = operations(lambda x: jax.debug.print("{}", x) or x, floats(1))
    expect(any(operation.acts for operation in printing), f"nothing of {names(printing)} acts, which prints")
    sums = body_of(on_two(lambda x: x + jax.lax.psum(x, AXIS), SPLIT, check_vma=False), floats(2))
    acting = {operation.name: list(operation.eqn.effects) for operation in sums if operation.acts}
    expect(not acting, f"a sum over the ranks acts: {acting}")


def _printed() -> None:
    def text(number: float) -> str:
        deep = lambda x: functools.reduce(lambda x, _: jnp.sin(x), range(200), x) * number
        return str(jax.make_jaxpr(lambda x: jax.lax.scan(lambda c, _: (deep(c), None), x, length=2)[0])(floats(1)))

    expect(text(2.0) == text(2.0), "the same program traced twice is printed in two ways")
    expect(text(2.0) != text(3.0), "programs that differ in a number inside a loop are printed alike")


EQUATIONS_CANARIES = (
    Canary(
        "programs inside equations",
        "Calls, loops and branches hold their bodies under the names we read.",
        "Units, stages and optimizers on shards do not see what a loop or a call does.",
        _inner,
    ),
    Canary(
        "parts of a scan",
        "A scan says how many of its operands are constants and how many are carried.",
        "Weights that a loop reads are taken for its carry: units and cuts go wrong.",
        _scans,
    ),
    Canary(
        "equations bound again",
        "get_bind_params gives what a primitive is bound with, so that an equation can be run again on other values.",
        "What runs under a plan is not what the model traced.",
        _bound_again,
    ),
    Canary(
        "literals",
        "A number written into a program is a Literal with a value.",
        "Numbers are taken for results of other equations, and looked for in vain.",
        _literals,
    ),
    Canary(
        "where equations come from",
        "An equation knows its name scopes and the functions that called it.",
        "Traffic loses its labels, messages name no line of the user's.",
        _sources,
    ),
    Canary(
        "dead code",
        "dce_jaxpr removes what no result needs, as lowering does, and leaves what a barrier waits for.",
        "The ledger counts collectives that are never sent, or misses some that are.",
        _dead_code,
    ),
    Canary(
        "effects",
        "Only what acts has an effect, besides NamedAxisEffect of collectives.",
        "Printing disappears from loops that are cut, or everything that communicates is kept from being cut.",
        _effects,
    ),
    Canary(
        "printed programs",
        "A traced program prints whole, and the same each time but for addresses.",
        "Processes that traced different programs are not found out, or equal ones are refused.",
        _printed,
    ),
)


# --------------------------------------------------------------------------------------------------
# Canaries about `compat/order.py`: ZeRO-3 and pipelines keep no weight between forward and backward.
# --------------------------------------------------------------------------------------------------

_KEPT_SIZE = 4
_WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "a product": lambda w, x: x @ w,
    "an elementwise function": lambda w, x: jnp.tanh(w * x),
    "a product inside jit": lambda w, x: jax.jit(lambda w, x: jnp.sin(x @ w))(w, x),
    "a product under jax.checkpoint": lambda w, x: jax.checkpoint(lambda w, x: jnp.sin(x @ w))(w, x),
    "a product whose result a policy saves": lambda w, x: jax.checkpoint(
        lambda w, x: jnp.sin(x @ w), policy=jax.checkpoint_policies.everything_saveable
    )(w, x),
    "a product in a scan": lambda w, x: jax.lax.scan(lambda c, _: (jnp.sin(c @ w), None), x, length=2)[0],
}


def _identical() -> None:
    lost: list[str] = []

    def run(way: str, mode: str, w: Any, x: Any) -> Any:
        w = cast_to_varying(w, (AXIS,)) if mode == "check_vma=True" else w
        out, _, saved = vjp_without(lambda w, x: (_WAYS[way](w, x), ()), (w, x), [w])
        if (True, 0) not in saved.places:
            lost.append(f"{way} ({mode})")
        return saved.restore([w])(out)[1]

    square, rows = floats(_KEPT_SIZE, _KEPT_SIZE), floats(2 * _KEPT_SIZE, _KEPT_SIZE)
    for way in _WAYS:
        jax.make_jaxpr(functools.partial(run, way, "no mesh"))(square, square)
        for check_vma in (True, False):
            rank = functools.partial(run, way, f"check_vma={check_vma}")
            jax.make_jaxpr(on_two(rank, WHOLE, SPLIT, check_vma=check_vma))(square, rows)
    expect(not lost, f"among the residuals the weights are other objects than the arguments in {', '.join(lost)}")


def _restored() -> None:
    x, w, other = (jnp.arange(4.0).reshape(2, 2) + k for k in range(3))
    out, _, saved = vjp_without(lambda w, x: (x @ w, ()), (w, x), [w])
    expect(len(saved.places) >= 2, f"the vjp of a product of two arrays is a pytree of {len(saved.places)} leaves")
    ones = jnp.ones_like(out)
    of_w, of_x = saved.restore([other])(ones)
    right = np.array_equal(of_w, x.T @ ones) and np.array_equal(of_x, ones @ other.T)
    expect(right, f"with other weights put in their place the gradients of x @ w are {of_w.tolist()}, {of_x.tolist()}")


KEPT_RESIDUALS_CANARIES = (
    Canary(
        "residuals are the arguments",
        "Among the leaves of what jax.vjp returns, weights are the very objects that went in (with check_vma=True, once cast).",
        "Every weight is kept whole from forward to backward: right results, and ZeRO-3's and the pipeline's memory lost.",
        _identical,
    ),
    Canary(
        "a vjp is a pytree",
        "What jax.vjp returns can be flattened, and called after other arrays were put in the place of its leaves.",
        "The backward computes with the weights of another unit, or keeps them in a closure.",
        _restored,
    ),
)


# --------------------------------------------------------------------------------------------------
# Canaries about where arrays lie: donated buffers, buffers that branches write into, host memory.
# --------------------------------------------------------------------------------------------------


def _donated() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), (AXIS,), axis_types=(AxisType.Auto,))
    step = jax.shard_map(lambda x: x + 1, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT)
    x = jax.device_put(jnp.ones(4), NamedSharding(mesh, SPLIT))
    before = sorted(_buffers(x))
    after = sorted(_buffers(jax.block_until_ready(jax.jit(step, donate_argnums=0)(x))))
    expect(x.is_deleted(), "a donated sharded array is still there after the step")
    expect(before == after, "a step does not reuse the buffers of what was donated to it")


def _buffers(x: Any) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards]


def _in_place() -> None:
    rows, size = 8, 4096

    def step(buffer: Any, i: Any) -> Any:
        put = lambda row: lambda buffer: jax.lax.dynamic_update_index_in_dim(buffer, row(buffer[i % rows]), i % rows, 0)
        return jax.lax.cond(i % 2 == 0, put(jnp.sin), put(jnp.cos), buffer), None

    loop = jax.jit(lambda buffer: jax.lax.scan(step, buffer, jnp.arange(16))[0], donate_argnums=0)
    text = str(loop.lower(floats(rows, size)).compile().as_text())
    copied = [line for line in text.splitlines() if re.search(rf"= f32\[{rows},{size}\]\S* copy\(", line)]
    in_place = versions.BRANCHES_WRITE_IN_PLACE
    expect(
        bool(copied) != in_place,
        f"of a loop whose branches write into its buffer XLA:CPU copies the buffer {len(copied)} times",
    )


def _host() -> None:
    kept = jax.jit(lambda x: jnp.sin(jax.device_put(jnp.cos(x), jax.memory.Space.Host))).trace(floats(4))
    places = [
        line
        for line in kept.lower(lowering_platforms=("tpu",)).as_text().splitlines()
        if "annotate_device_placement" in line
    ]
    expect(
        any("pinned_host" in line for line in places), f"device_put to Space.Host inside a program lowers to {places}"
    )


PLACING_CANARIES = (
    Canary(
        "donated buffers",
        "A committed, sharded array that is donated is deleted, and the step writes into its buffers.",
        "Every step holds parameters and optimizer state twice.",
        _donated,
    ),
    Canary(
        "branches write in place",
        "From jax 0.11 on XLA:CPU lets a branch write into a buffer of the loop around it.",
        "A pipeline copies everything that it keeps in every tick; or writes twice what it could write once.",
        _in_place,
    ),
    Canary(
        "host memory",
        "device_put to Space.Host inside a program becomes a placement in pinned_host.",
        "What is offloaded stays on the device.",
        _host,
    ),
)


# --------------------------------------------------------------------------------------------------
# Canaries about what surrounds traced code (`compat/order.py`).
# --------------------------------------------------------------------------------------------------


def _traces() -> None:
    seen: dict[str, Any] = {}

    def look(name: str, x: Any) -> Any:
        seen[name] = current_trace()
        return x

    def outer(x: Any) -> Any:
        look("a trace", x)
        jax.lax.scan(lambda c, _: (look("a scan's body", c), None), x, length=2)
        jax.checkpoint(lambda x: look("jax.checkpoint", x))(x)
        expect(seen["a trace"] == current_trace(), "one trace says that it is two")
        return x

    look("no trace", None)
    jax.make_jaxpr(outer)(floats(2))
    jax.make_jaxpr(lambda x: look("another trace", x))(floats(2))
    alike = [(a, b) for a in seen for b in seen if a < b and seen[a] == seen[b]]
    expect(not alike, f"these cannot be told from each other: {alike}")


def _settings() -> None:
    usual = trace_settings()
    for name, changed in (
        ("a precision of products", jax.default_matmul_precision("highest")),
        ("strict dtypes", jax.numpy_dtype_promotion("strict")),
    ):
        with changed:
            expect(trace_settings() != usual, f"with {name} they are those without it")
    again = trace_settings()
    expect(again == usual and hash(again) == hash(usual), "the same settings are not equal to themselves")


def _platform() -> None:
    seen: list[str] = []
    kind = jax.sharding.AbstractDevice(device_kind="canary", num_cores=None, platform="a canary's")
    mesh = AbstractMesh((2,), (AXIS,), axis_types=(AxisType.Auto,), abstract_device=kind)
    mapped = jax.shard_map(lambda x: seen.append(platform_around()) or x, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT)
    jax.make_jaxpr(mapped)(floats(2))
    expect(seen == [kind.platform], f"inside shard_map over devices of the platform {kind.platform!r} it is {seen}")
    device = jax.devices()[0]
    own = platform_around(Mesh(np.array([device]), (AXIS,), axis_types=(AxisType.Auto,)))
    expect(own == device.platform, f"of a mesh of {device.platform} devices the platform is {own!r}")


def _placements() -> None:
    mesh = AbstractMesh((2,), (AXIS,), axis_types=(AxisType.Auto,))
    spelt: dict[str, Callable[[Any], Any]] = {
        "an axis that is not there": lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec("elsewhere")),
        "a manual axis": lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec(AXIS)),
        "reshard": lambda x: jax.sharding.reshard(x, PartitionSpec(AXIS)),
        "out_sharding=": lambda x: jnp.einsum("i,j->ij", x, x, out_sharding=PartitionSpec(AXIS)),
        "an array made so": lambda x: x + jnp.zeros(x.shape, out_sharding=PartitionSpec(AXIS)),
    }
    for name, place in spelt.items():
        try:
            jax.make_jaxpr(jax.shard_map(place, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT, check_vma=False))(floats(2))
        except Exception as error:
            expect(refuses_placement(error), f"placing by {name} is refused in words that are not known: {error}")
            expect(axis_not_found(error) == ("elsewhere" if name == "an axis that is not there" else None), str(error))
        else:
            expect(False, f"placing by {name} is not refused inside shard_map: it may mean something there")


def _users_mesh() -> None:
    one = AbstractMesh((1,), ("theirs",), axis_types=(AxisType.Explicit,))
    mesh, seen = AbstractMesh((2,), (AXIS,), axis_types=(AxisType.Auto,)), []

    def look(x: Any) -> Any:
        with standing_for(one):
            seen.append((manual_axes(), tuple(jax.sharding.get_abstract_mesh().axis_names)))
            jax.make_jaxpr(lambda x: jax.sharding.reshard(x, PartitionSpec("theirs")))(floats(2))
        return x

    jax.make_jaxpr(jax.shard_map(look, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT, check_vma=False))(floats(2))
    expect(seen == [(frozenset({AXIS}), ("theirs",))], f"where the user's axes stand for ours, code sees {seen}")
    with jax.set_mesh(jax.make_mesh((1,), ("theirs",), devices=jax.devices()[:1])):
        with no_mesh_around():
            expect(jax.sharding.get_abstract_mesh().empty, "a mesh that was taken away is still set")
        expect(
            jax.sharding.get_abstract_mesh().axis_names == ("theirs",), "a mesh that was taken away is not there again"
        )


TRACES_CANARIES = (
    Canary(
        "traces are told apart",
        "The opaque state of a trace equals itself and no other's, and that of a loop's body is its own.",
        "A token of another trace is used (an error of leaked tracers), or prefetching orders nothing.",
        _traces,
    ),
    Canary(
        "settings are told apart",
        "JAX's own key of traces differs where a setting that programs depend on does.",
        "On simulated devices a step under `jax.default_matmul_precision` runs in the precision of an earlier call.",
        _settings,
    ),
    Canary(
        "the platform around",
        "An abstract mesh tells the kind of device it stands for.",
        "Attention kernels are chosen for the machine that compiles, not for the one that runs.",
        _platform,
    ),
    Canary(
        "words of a refused placement",
        "Inside shard_map JAX refuses code that places arrays over manual axes, and axes that are not there, in words we know.",
        "A model with constraints of its own is refused in JAX's words, or means something else than on one device.",
        _placements,
    ),
    Canary(
        "a mesh of one device",
        "Another mesh may stand in the place of the one around traced code, and one that is set may be taken away.",
        "Public entries are refused under jax.set_mesh, and so is code that places arrays.",
        _users_mesh,
    ),
)


# --------------------------------------------------------------------------------------------------
# Canaries about varying types (`varying_types.py`), with which collectives and pipelines decide what to sum and to
# pack.
# --------------------------------------------------------------------------------------------------


def _seen(check_vma: bool) -> dict[str, frozenset[str]]:
    """The varying axes of some values inside `shard_map`."""
    seen: dict[str, frozenset[str]] = {}

    def look(x: Any, w: Any) -> Any:
        seen["a rank's part"], seen["a whole array"] = varying_axes(x), varying_axes(w)
        seen["a sum over the ranks"] = varying_axes(jax.lax.psum(x, AXIS))
        seen["a rank's index"] = varying_axes(jax.lax.axis_index(AXIS))
        seen["their product"] = varying_axes(x * w)
        return x

    jax.make_jaxpr(on_two(look, SPLIT, WHOLE, check_vma=check_vma))(floats(2), floats(1))
    return seen


def _typed() -> None:
    seen = _seen(check_vma=True)
    varying = {name for name, axes in seen.items() if axes == {AXIS}}
    whole = {name for name, axes in seen.items() if not axes}
    expect(
        varying == {"a rank's part", "a rank's index", "their product"} and len(varying | whole) == len(seen),
        f"with check_vma=True these vary: {seen}",
    )


def _untyped() -> None:
    seen = _seen(check_vma=False)
    expect(not any(seen.values()), f"with check_vma=False these vary: {seen}")


def _casts() -> None:
    def pull(w: Any, x: Any) -> Any:
        cast = cast_to_varying(w, (AXIS,))
        expect(varying_axes(cast) == {AXIS}, f"a value cast to varying varies over {set(varying_axes(cast))}")
        inside = jax.grad(lambda cast: jnp.sum(cast * x))(cast)  # this rank's own
        outside = jax.grad(lambda w: jnp.sum(cast_to_varying(w, (AXIS,)) * x))(w)  # the sum over the ranks
        expect(varying_axes(inside) == {AXIS}, "the gradient of a cast value is the same on every rank")
        expect(not varying_axes(outside), "the gradient of what was cast differs from rank to rank")
        return inside + outside

    found = names(body_of(on_two(pull, WHOLE, SPLIT, check_vma=True), floats(1), floats(2)))
    expect(bool(CASTS & set(found)), f"a cast is none of {sorted(CASTS)}: {found}")
    sums = [name for name in found if name.startswith("psum")]
    expect(len(sums) == 1, f"one cast inside a gradient makes {len(sums)} sums over the ranks: {found}")


def _manual() -> None:
    mesh, seen = AbstractMesh((2, 2), (AXIS, "other"), axis_types=(AxisType.Auto,) * 2), []

    def look(x: Any) -> Any:
        seen.append(manual_axes())
        jax.vmap(lambda x: seen.append(manual_axes()) or x, axis_name="mapped")(x)
        return x

    partly = jax.shard_map(look, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT, axis_names={AXIS}, check_vma=False)
    jax.make_jaxpr(jax.jit(partly))(floats(2))
    expect(
        set(seen) == {frozenset({AXIS})}, f"inside shard_map over {AXIS} alone, and vmap, the manual axes are {seen}"
    )
    expect(not manual_axes(), f"outside they are {set(manual_axes())}")


TYPED = Canary(
    "varying types are told",
    "With check_vma=True an abstract value says over which mesh axes it varies: a rank's part does, a sum does not.",
    "Everything reads as the same on every rank: gradients are summed twice or never, pipelines join what must stay apart.",
    _typed,
)
UNTYPED = Canary(
    "without check_vma nothing varies",
    "With check_vma=False no value has a varying type.",
    "Casts and sums are added where the user's gradients are right without them.",
    _untyped,
)
TYPED_CANARIES = (
    TYPED,
    UNTYPED,
    Canary(
        "casts to varying",
        "A cast to varying changes the type and moves nothing; the gradient of what was cast is summed over the axes once.",
        "Gradients are summed in every microbatch, twice, or not at all.",
        _casts,
    ),
    Canary(
        "manual axes",
        "The mesh around traced code says which of its axes shard_map has made manual, without those of vmap.",
        "Layers compute as if they were not split, or look for ranks that are not there.",
        _manual,
    ),
)


def require_types(check_vma: bool) -> None:
    """Tries the canary of a mode once per process, before types are relied on; it takes some milliseconds.

    Under a mesh it does nothing, as JAX takes no second mesh there; a later call without one tries it.

    Raises:
      CanaryError: when the JAX that is installed tells varying types in another way.
    """
    if jax.sharding.get_abstract_mesh().empty:
        _once(check_vma)


@functools.cache
def _once(check_vma: bool) -> None:
    (TYPED if check_vma else UNTYPED).check()


# --------------------------------------------------------------------------------------------------
# Canaries about waiting (`compat/order.py`), without which collectives of simulated devices mix up or never end.
# --------------------------------------------------------------------------------------------------


def _compiled_waits() -> None:
    def both(x: Any, y: Any) -> Any:
        return waiting(jnp.sin(x), [jnp.cos(y)])

    text = str(jax.jit(both).lower(floats(64), floats(32)).compile().as_text())
    expect("cosine(" in text, "a value that waits for a cosine is made without it in the compiled program")


WAITS_CANARIES = (
    Canary(
        "waiting is compiled",
        "XLA does not see that a value which waits for others is the same without them.",
        "Collectives of simulated devices overlap with those of a loop: wrong numbers, a hang or an abort.",
        _compiled_waits,
    ),
)


# --------------------------------------------------------------------------------------------------
# Every canary, in the order in which `python -m axonml_jax.compat` runs them.
# --------------------------------------------------------------------------------------------------

CANARIES: tuple[Canary, ...] = (
    *TYPED_CANARIES,
    *BARRIERS_CANARIES,
    *WAITS_CANARIES,
    *KEPT_RESIDUALS_CANARIES,
    *ASKED_POLICIES_CANARIES,
    *EQUATIONS_CANARIES,
    *COLLECTIVE_NAMES_CANARIES,
    *TRACES_CANARIES,
    *PLACING_CANARIES,
    *PROCESSES_CANARIES,
    *RANDOM_ELEMENTS_CANARIES,
    *PIECES_BY_SPLASH_CANARIES,
    *TRITON_CANARIES,
)
"""Every canary there is."""
