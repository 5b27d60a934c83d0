"""A run's speeds, and the peak FLOP/s of accelerators, for MFU."""

import re
from pathlib import Path

from axonml_jax.launch.config.run_config import RunConfig
from axonml_jax.launch.config.sections.own_config import OwnModel
from axonml_jax.launch.config.stretches import examples_until
from axonml_jax.launch.job.run_setup import RunSetup
from axonml_jax.training.metrics import Throughput

# Dense bfloat16, from the makers' data sheets. Kinds as `jax.Device.device_kind` spells them. The PCIe and NVL cards of
# the H100 are slower than the SXM module and left out rather than flattered.
_PEAKS = {
    r"TPU v4": 275e12,
    r"TPU v5 ?(lite|e)": 197e12,
    r"TPU v5p?": 459e12,
    r"TPU v6 ?(lite|e)": 918e12,
    r"NVIDIA A100.*": 312e12,
    r"NVIDIA H100(?!.*(PCIe|NVL)).*": 989e12,
    r"NVIDIA H200(?!.*NVL).*": 989e12,
}


def peak_flops(device_kind: str) -> float | None:
    """Peak bfloat16 FLOP/s of one device, or None where it is not known (every CPU).

    >>> peak_flops("NVIDIA H100 80GB HBM3"), peak_flops("cpu")
    (989000000000000.0, None)
    """
    return next((peak for kind, peak in _PEAKS.items() if re.fullmatch(kind, device_kind, re.IGNORECASE)), None)


def throughput(config: RunConfig, ground: RunSetup, folder: Path | None = None, start: int = 0) -> Throughput:
    """What turns the durations of a run's steps into its speeds.

    Args:
      config: of the run.
      ground: what it stands on.
      folder: of the run, which says of what batches the steps before were made; None: of none like these.
      start: how many steps there were.
    """
    rows, model, length = config.train.global_batch_size, config.model, config.data.length
    kind, own = ground.mesh.devices.flat[0].device_kind, ground.own is not None
    adapters = config.finetune.lora.rank is not None  # fewer, as no gradient of the base is made
    drawn = examples_until(folder, start) if folder is not None and start else None
    return Throughput(
        tokens_per_step=rows if own else rows * length,
        flops_per_token=None if own or adapters or isinstance(model, OwnModel) else model.flops_per_token(length),
        num_devices=ground.mesh.size,
        peak_flops=peak_flops(kind),
        unit="examples" if own else "tokens",
        before=0 if drawn is None else (drawn - start * rows) * (1 if own else length),
    )
