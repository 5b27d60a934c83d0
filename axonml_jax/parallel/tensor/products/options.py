"""The keyword arguments that a parallel layer passes on to the Flax layer it is."""

from collections.abc import Callable, Mapping
from typing import Any, TypedDict

from flax import nnx


class WeightOptions(TypedDict, total=False):
    """Those that `nnx.Linear` and `nnx.Conv` share."""

    dtype: Any
    param_dtype: Any
    precision: Any
    kernel_init: nnx.Initializer
    bias_init: nnx.Initializer
    promote_dtype: Callable[..., Any]
    preferred_element_type: Any
    kernel_metadata: Mapping[str, Any]
    bias_metadata: Mapping[str, Any]


class LinearOptions(WeightOptions, total=False):
    """Those of `nnx.Linear`, with its defaults and its meaning."""

    dot_general: Callable[..., Any]


class EmbedOptions(TypedDict, total=False):
    """Those of `nnx.Embed`, with its defaults and its meaning."""

    dtype: Any
    param_dtype: Any
    embedding_init: nnx.Initializer
    promote_dtype: Callable[..., Any]
    embedding_metadata: Mapping[str, Any]


class ConvOptions(WeightOptions, total=False):
    """Those of `nnx.Conv`, with its defaults and its meaning."""

    padding: Any
    input_dilation: Any
    kernel_dilation: Any
    mask: Any
    conv_general_dilated: Callable[..., Any]


class NormOptions(TypedDict, total=False):
    """Those of `nnx.LayerNorm`, with its defaults and its meaning; all but the bias's are `nnx.RMSNorm`'s too."""

    epsilon: float
    dtype: Any
    param_dtype: Any
    use_bias: bool
    use_scale: bool
    bias_init: nnx.Initializer
    scale_init: nnx.Initializer
    use_fast_variance: bool
    promote_dtype: Callable[..., Any]
    bias_metadata: Mapping[str, Any]
    scale_metadata: Mapping[str, Any]
