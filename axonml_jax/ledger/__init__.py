"""What a training step holds and sends: predicted from shapes, counted on its trace and lowered program, beside formulas."""

from axonml_jax.cost.decoder import wire_elements as wire_elements
from axonml_jax.ledger.compiled import CompiledCollective as CompiledCollective
from axonml_jax.ledger.compiled import Difference as Difference
from axonml_jax.ledger.compiled import Moved as Moved
from axonml_jax.ledger.compiled import agreement as agreement
from axonml_jax.ledger.compiled import collectives_in_compiled as collectives_in_compiled
from axonml_jax.ledger.compiled import collectives_in_lowered as collectives_in_lowered
from axonml_jax.ledger.compiled import moved as moved
from axonml_jax.ledger.count import Branch as Branch
from axonml_jax.ledger.count import Collective as Collective
from axonml_jax.ledger.count import Loop as Loop
from axonml_jax.ledger.count import TrafficRow as TrafficRow
from axonml_jax.ledger.count import collectives_in as collectives_in
from axonml_jax.ledger.predict import Prediction as Prediction
from axonml_jax.ledger.predict import difference as difference
from axonml_jax.ledger.predict import memory_difference as memory_difference
from axonml_jax.ledger.predict import predict as predict
from axonml_jax.ledger.report import Report as Report
from axonml_jax.ledger.report import explain as explain
