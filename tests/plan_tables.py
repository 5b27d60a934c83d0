"""Tables of plans: the whole product of a plan's options, and a seeded pairwise cover of it for CI."""

import itertools
import random

DDP = {
    "case": None,  # filled by the caller
    "sync_strategy": ["synchronous", "overlapped", "no_sync"],
    "bucket_size_mb": [0.0002, 25.0],
    "gradient_as_bucket_view": [True, False],
    "accumulate": [1, 3],
    "ranks": [2, 3, 8],
    "check_vma": [False, True],
    "max_grad_norm": [None, 0.3],
}


def product(table):
    """Every combination, as dicts."""
    return [dict(zip(table, row, strict=True)) for row in itertools.product(*table.values())]


def pairwise(table, seed=0, possible=None):
    """Combinations such that every pair of values of two options occurs together that can (greedy, seeded).

    Args:
      table: the values of each option.
      seed: of the choice.
      possible: whether a combination can be; None: all can.
    """
    rng, names = random.Random(seed), list(table)
    if possible is None:
        wanted = {
            ((a, x), (b, y))
            for (a, b) in itertools.combinations(names, 2)
            for x, y in itertools.product(map(str, table[a]), map(str, table[b]))
        }
        draw = lambda: {name: rng.choice(list(values)) for name, values in table.items()}
    else:
        rows = [row for row in product(table) if possible(row)]
        wanted = set().union(*map(_pairs, rows))
        draw = lambda: rng.choice(rows)
    cover = []
    while wanted:
        candidates = [draw() for _ in range(60)]
        best = max(candidates, key=lambda row: len(_pairs(row) & wanted))
        if _pairs(best) & wanted:
            cover.append(best)
            wanted -= _pairs(best)
    return cover


def _pairs(row):
    return set(itertools.combinations([(name, str(value)) for name, value in row.items()], 2))


def name(row):
    """A short test id."""
    return "-".join(str(value) for value in row.values())
