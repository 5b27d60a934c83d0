"""The tables of plans that `full_matrix.py` runs: the rows of each, how one is held to one device, what the oracle is of.

Imported there, in processes whose devices are simulated already.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

TABLES = ("ddp", "fsdp", "pipeline", "experts", "auxiliary", "attention", "context")
DRAWN = ("prefetch", "remat", "flat", "hops", "sync_strategy")
"""Options of FSDP whose product with the others would take days."""


@dataclass(frozen=True)
class Table:
    """One table.

    Attributes:
      rows: the plans, as dicts, given a seed of what is drawn.
      check: raises where a row differs from one device.
      oracle: of a row, what its single-device run depends on: rows that agree in it share one.
      together: checks rows of one oracle in one program, whose kernels XLA compiles once; raises where any of them differs.
        None: they are checked one by one, as they also are after it has raised.
    """

    rows: Callable[[int], list[dict[str, Any]]]
    check: Callable[[dict[str, Any]], None]
    oracle: Callable[[dict[str, Any]], Any]
    together: Callable[[list[dict[str, Any]]], None] | None = None


def table(name: str) -> Table:
    """The table of a name; what it needs is imported now."""
    if name in ("experts", "auxiliary"):
        from matrix_experts import auxiliary, experts

        return Table(*(experts if name == "experts" else auxiliary))
    if name in ("attention", "context"):
        from matrix_context import attention, context

        return Table(*(attention if name == "attention" else context))
    return {"ddp": _ddp, "fsdp": _fsdp, "pipeline": _pipeline}[name]()


def drawn(
    product: list[dict[str, Any]], options: dict[str, list], fits: Callable[[dict], bool], seed: int
) -> list[dict]:
    """Every row of a product, with the other options drawn so that they fit it."""
    rng, rows = random.Random(seed), []
    for row in product:
        while not fits(full := row | {name: rng.choice(values) for name, values in options.items()}):
            pass
        rows.append(full)
    return rows


def _ddp() -> Table:
    from plan_models import CASES
    from plan_tables import DDP, product
    from test_ddp_equality import check

    def rows(seed):
        plans = product(DDP | {"case": list(CASES)})
        # Models whose scans start from plain zeros do not pass typed mode.
        return [row for row in plans if CASES[row["case"]].typed or not row["check_vma"]]

    return Table(rows, check, itemgetter("case", "ranks", "accumulate", "max_grad_norm"))


def _fsdp() -> Table:
    from fsdp_plans import FSDP, check, possible
    from plan_tables import product

    def rows(seed):
        rng = random.Random(seed)
        plans = product({name: values for name, values in FSDP.items() if name not in DRAWN})
        return [row | {name: rng.choice(FSDP[name]) for name in DRAWN} for row in plans if possible(row)]

    return Table(rows, check, itemgetter("case", "data", "fsdp", "accumulate", "max_grad_norm"))


def _pipeline() -> Table:
    from plan_tables import pairwise
    from test_pipeline_training import TABLE, check, possible

    rows = lambda seed: [row for row in pairwise(TABLE, seed) if possible(row)]
    oracle = ("model", "schedule", "ranks", "microbatches", "mesh", "accumulate", "max_grad_norm")
    return Table(rows, check, itemgetter(*oracle))
