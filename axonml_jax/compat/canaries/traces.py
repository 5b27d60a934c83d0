"""Canaries about what surrounds traced code (`around.py`)."""

from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from axonml_jax.compat.around import current_trace, platform_around, trace_settings
from axonml_jax.compat.canaries.canary import Canary, expect
from axonml_jax.compat.canaries.on_two import AXIS, SPLIT, floats


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


CANARIES = (
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
)
