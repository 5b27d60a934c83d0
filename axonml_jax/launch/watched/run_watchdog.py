"""The watchdog of a run, and what its flight records say of the run: its configuration's hash, and its step's collectives."""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from axonml_jax.facade.trainer import Trainer
from axonml_jax.launch.config.read_config import as_dict
from axonml_jax.launch.config.run_config import RunConfig
from axonml_jax.launch.job.run_setup import RunSetup
from axonml_jax.ledger.traced import collectives_in
from axonml_jax.mesh.watch.flight import FlightRecord
from axonml_jax.mesh.watch.watchdog import Watchdog


@contextmanager
def run_watchdog(config: RunConfig, ground: RunSetup, trainer: Trainer, folder: Path) -> Iterator[Watchdog]:
    """Watch a run; if it dies, its processes leave their records in its folder.

    Args:
      config: of the run; says after how long.
      ground: what it stands on.
      trainer: whose steps are watched.
      folder: of the run.
    """
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), trainer.state)
    collectives = lambda: in_order(lambda: trainer.train_step.trace(state, ground.batch))
    about = {"configuration": configuration_hash(config), "mesh": dict(ground.mesh.shape)}
    with (
        FlightRecord(folder, about=about, collectives=collectives) as record,
        Watchdog(config.train.stuck_timeout, warning=config.train.stuck_warning, record=record) as watchdog,
    ):
        yield watchdog


def configuration_hash(config: RunConfig) -> str:
    """A digest of all settings; those of processes that were started alike are equal."""
    return hashlib.sha256(json.dumps(as_dict(config), sort_keys=True, default=str).encode()).hexdigest()[:16]


def in_order(trace: Callable[[], Any]) -> list[dict[str, Any]]:
    """The collectives of a traced step in the order of its program, as plain values: `bytes` are those of the whole arrays."""
    return [
        {
            "kind": each.kind,
            "op": each.op,
            "axes": list(each.axes),
            "ranks": each.group_size,
            "arrays": each.leaves,
            "dtype": each.dtype,
            "bytes": each.itemsize * each.elements,
            "where": each.where,
            "moves": each.label,
        }
        for each in collectives_in(trace().jaxpr)
    ]
