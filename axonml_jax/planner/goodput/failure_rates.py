"""How often devices fail, as published: interruptions of a training over the device-hours in which they were counted."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class FailureRate:
    """How often the devices of one cluster interrupt a job.

    Attributes:
      name: what it is called.
      events: interruptions that were counted.
      device_hours: in which they were.
      counted: what counts as one.
      source: where both are from.
    """

    name: str
    events: float
    device_hours: float
    counted: str
    source: str

    @property
    def per_device_hour(self) -> float:
        """Interruptions of a job for each of its devices and each hour."""
        return self.events / self.device_hours


def _of_nodes(name: str, per_thousand_node_days: float) -> FailureRate:
    return FailureRate(
        name=name, events=per_thousand_node_days, device_hours=1000 * 24 * 8,
        counted="failures of infrastructure that ended a job, per thousand days of a node of 8 A100",
        source="Kokolis et al., Revisiting Reliability in Large-Scale Machine Learning Research Clusters (HPCA 2025)",
    )  # fmt: skip


FAILURE_RATES: dict[str, FailureRate] = {
    each.name: each
    for each in (
        FailureRate(
            name="llama3", events=419, device_hours=54 * 24 * 16384,
            counted="unexpected interruptions of one training in 54 days on 16,384 H100",
            source="Grattafiori et al., The Llama 3 Herd of Models (2024), section 3.3.4",
        ),
        _of_nodes("rsc-1", 6.50),
        _of_nodes("rsc-2", 2.34),
        FailureRate(
            name="opt-175b", events=35 + 70, device_hours=2 * 30 * 24 * 992,
            counted="restarts for hardware in 2 months on 992 A100, manual (at least 35) and automatic (estimated 70 and more)",
            source="Zhang et al., OPT: Open Pre-trained Transformer Language Models (2022), section 2.5",
        ),
        FailureRate(
            name="tpu-v4", events=0.0008, device_hours=24 * 4,
            counted="machines of 4 chips that fail, 0.08% a day; links and switches left out",
            source="Zu et al., Resiliency at Scale: Managing Google's TPUv4 Supercomputer (NSDI 2024), section 5.2",
        ),
    )
}  # fmt: skip
"""Name -> rate. None of them says how failures of one moment hang together: they are taken to come one by one."""


def failure_rate(given: "str | float") -> float:
    """Interruptions per device-hour, by the name of a published cluster or as a number.

    >>> f"{failure_rate('llama3'):.2e}"
    '1.97e-05'
    >>> failure_rate("1e-4")
    0.0001

    Raises:
      ValueError: for another name, or a number below 0.
    """
    if isinstance(given, str) and given.lower() in FAILURE_RATES:
        return FAILURE_RATES[given.lower()].per_device_hour
    try:
        rate = float(given)
    except ValueError:
        rate = float("nan")
    if not 0 <= rate < float("inf"):
        raise ValueError(
            f"{given!r} is no failure rate: give failures per device-hour (0 or more), or one of {', '.join(FAILURE_RATES)}"
        )
    return rate
