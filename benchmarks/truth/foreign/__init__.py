"""Models that others publish, each under every plan; see `benchmarks/truth/foreign_models.py`."""

from .family import Family as Family
from .huggingface import FAMILIES as HUGGINGFACE
from .others import FAMILIES as OTHERS
from .tunix import FAMILIES as TUNIX

FAMILIES = (*HUGGINGFACE, *TUNIX, *OTHERS)
