"""A share of docs/maintainers/foreign-models.md: models of packages that the extra `test` brings, held to plain `jax.jit`."""

import sys
import warnings
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from foreign import FAMILIES, cells

BY_NAME = {family.name: family for family in FAMILIES}

# Every plan and variant at least once; the whole product is the script's.
CELLS = [
    ("Mamba-2", "FSDP", "remat"),
    ("Mamba-2", "Pipeline", "accumulate"),
    ("Mamba-2", "tensor, automatic", "plain"),
    ("Transformer in transformer", "tensor, by rules", "plain"),
    ("ResNet (jax-resnet)", "Pipeline", "plain"),
    ("ResNet (jax-resnet)", "HYBRID", "accumulate"),
    ("ResNet (jax-resnet)", "DDP", "bf16"),
]


@pytest.mark.parametrize(("family", "plan", "variant"), CELLS)
def test_other_peoples_models_train_as_on_one_device(family, plan, variant):
    pytest.importorskip(BY_NAME[family].package.replace("-", "_"), reason="needs the extra `test`")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs
        result, why = cells.run(BY_NAME[family], plan, variant, {})
    assert result == "equal", why
