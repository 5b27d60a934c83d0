"""What routers did, as metrics of a step."""

import jax.numpy as jnp

from axonml_jax.model.loss import WeightedMean
from axonml_jax.parallel.experts.router_values import MOST_LOADS, RouterValues


def router_metrics(routers: RouterValues) -> dict[str, WeightedMean]:
    """Metrics for `loss_fn` to return, means over the layers with experts.

    Args:
      routers: of L layers, stacked along dim 0 (`Transformer.loss_and_routers`).

    Returns:
      By name: `experts/load_balance`, `experts/z`, `experts/entropy` (nats), `experts/dropped` (a share), `experts/rounds`,
      `experts/busiest` (the fullest expert's tokens over the mean), and for up to 64 experts `experts/load/0`, ..., each one's
      share of all choices.
    """
    counts = routers.counts.astype(routers.entropy.dtype)
    loads = counts / jnp.maximum(counts.sum(1, keepdims=True), 1)
    experts = loads.shape[1]
    found = {name: getattr(routers, name).mean() for name in ("load_balance", "z", "entropy", "dropped", "rounds")}
    found["busiest"] = experts * loads.max(1).mean()
    if experts <= MOST_LOADS:
        found |= {f"load/{e}": loads[:, e].mean() for e in range(experts)}
    return {f"experts/{name}": WeightedMean(value, 1.0) for name, value in found.items()}
