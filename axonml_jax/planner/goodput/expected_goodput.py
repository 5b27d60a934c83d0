r"""Expected goodput in closed form, and the interval between copies that makes it largest.

Goodput is training that is kept over wall time: 1 is a job that neither fails nor makes copies. With failures that come one
by one at a rate of 1/M per second (M: the job's mean time between failures), an interval of t seconds of training between two
copies, d seconds for which a copy stops the training, c seconds from its beginning until it can be returned to, and R seconds
from a failure until the training goes on (a failure in them begins them anew):

    goodput = t / M * exp(-(R + c - d) / M) / (exp((t + d) / M) - 1)

That is Daly's run time, M exp(R / M) (exp((t + d) / M) - 1) / t (A higher order estimate of the optimum checkpoint interval for
restart dumps, 2006), with copies that go on behind the training's back. Copies do not overlap: where t + d < c the training
waits for the copy before, and d is c - t. Young's (1974) is the first term of the best interval, sqrt(2 d M).
"""

import math

from axonml_jax.planner.goodput.recovery_ways import Recovery

HOUR = 3600.0
WEEK = 7 * 24 * HOUR


def expected_goodput(way: Recovery, *, rate: float, interval: float, replicas: int = 1) -> float:
    """Training kept over wall time, in the long run.

    Of replicas that go on without the failed one each is there for 1 / (1 + rate / replicas * replace) of the time, and fails
    and joins again equally often, so that all wait for (exp(rate * growing) - 1) of the time for one to join. What is lost of
    training is then a part of the step, which is the interval.

    Args:
      way: of recovery.
      rate: failures of the whole job per second.
      interval: seconds of training between two copies; of a way that shrinks those of a step.
      replicas: of the model; more than 1 for a way that shrinks.

    >>> saves = Recovery(name="disk", blocked=300, start=600)
    >>> f"{expected_goodput(saves, rate=1 / (24 * HOUR), interval=7020):.4f}"
    '0.9126'

    Raises:
      ValueError: for an interval or a rate that is none, or a way that shrinks to nothing.
    """
    if not (interval > 0 and 0 <= rate < math.inf):
        raise ValueError(f"interval={interval}, rate={rate}: the interval is above 0, the rate 0 or more and finite")
    there = 1.0
    if way.shrinks:
        if replicas < 2:
            raise ValueError(f"{way.name}: replicas={replicas}: a job shrinks to the replicas that live, of at least 2")
        there = 1 / (1 + rate / replicas * way.replace)
    blocked = 0.0 if way.shrinks else max(way.blocked, way.commit - interval)
    if rate == 0:
        return interval / (interval + blocked)
    rate, behind = rate * there, 0.0 if way.shrinks else way.commit - blocked
    joining = max(0.0, 1 - math.expm1(min(rate * way.growing, 1.0)))
    kept = (
        rate * interval * math.exp(-rate * (way.pause + behind)) / math.expm1(min(rate * (interval + blocked), 700.0))
    )
    return there * joining * kept


def daly_interval(blocked: float, mtbf: float) -> float:
    """Daly's higher-order estimate of the best seconds of training between two copies.

    sqrt(2 d M) (1 + 1/3 sqrt(d / 2M) + 1/9 d / 2M) - d for d < 2M, else M.

    >>> [f"{daly_interval(5, minutes):.3g}" for minutes in (24 * 60, 6 * 60, 15)]  # the paper's figures 3 to 5, in minutes
    ['117', '56.7', '9.14']

    Args:
      blocked: seconds for which a copy stops the training, d.
      mtbf: mean seconds between failures of the job, M.
    """
    if blocked >= 2 * mtbf:
        return mtbf
    share = blocked / (2 * mtbf)
    return math.sqrt(2 * blocked * mtbf) * (1 + math.sqrt(share) / 3 + share / 9) - blocked


def best_steps(way: Recovery, *, rate: float, step: float, most: int) -> int:
    """Steps between two copies that make the expected goodput largest.

    Daly's interval, or the shortest in which a copy is done before the next if that is longer, in whole steps.

    Args:
      way: of recovery; one that shrinks needs none.
      rate: failures of the whole job per second.
      step: seconds of a step.
      most: steps of the run: what a job that never fails saves after.

    Raises:
      ValueError: for a way that shrinks, or steps that are none.
    """
    if way.shrinks or not step > 0 or most < 1:
        raise ValueError(
            f"{way.name}: step={step}, most={most}: a way with copies, a step above 0 s, at least one step"
        )
    if rate == 0:
        return most
    wanted = max(daly_interval(way.blocked, 1 / rate), way.commit - way.blocked) / step
    near = {min(max(round_(wanted), 1), most) for round_ in (math.floor, math.ceil)}
    return max(sorted(near), key=lambda steps: expected_goodput(way, rate=rate, interval=steps * step))
