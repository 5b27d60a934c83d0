"""Every canary, in the order in which `python -m axonml_jax.compat` runs them."""

from axonml_jax.compat.canaries import (
    asked_policies,
    barriers,
    collective_names,
    equations,
    kept_residuals,
    pieces_by_splash,
    placing,
    processes,
    random_elements,
    traces,
    typed,
    waits,
)
from axonml_jax.compat.canaries.canary import Canary

CANARIES: tuple[Canary, ...] = (
    *typed.CANARIES,
    *barriers.CANARIES,
    *waits.CANARIES,
    *kept_residuals.CANARIES,
    *asked_policies.CANARIES,
    *equations.CANARIES,
    *collective_names.CANARIES,
    *traces.CANARIES,
    *placing.CANARIES,
    *processes.CANARIES,
    *random_elements.CANARIES,
    *pieces_by_splash.CANARIES,
)
"""Every canary there is."""
