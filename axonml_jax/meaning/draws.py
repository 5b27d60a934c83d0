"""Random draws by the whole batch's rows (`ax.Plan(draws="rows")`): whether a rank's draws are its rows of one device's.

Keys of rows (`compat/row_keys.py`) take a dim as long as a rank has rows for rows. The loss is traced at the whole batch's
shape and at a rank's, and of every draw both must say so: what is drawn otherwise is refused.
"""

from collections.abc import Iterator, Sequence

from axonml_jax.compat.model_call import Transformed
from axonml_jax.compat.row_keys import KNOWN, Drawn, rows_of
from axonml_jax.meaning.asked import Asked, Traced
from axonml_jax.meaning.model_call import Call


def refuse_draws(asked: Asked, whole: Traced | None, noted: Sequence[Call] | None) -> None:
    """Refuse a loss that draws something that is not known to be its rows of the whole draw.

    Args:
      asked: what is asked, with a key of rows.
      whole: the loss traced at the whole batch's shape, where that program is run; None: it is run on a rank's rows.
      noted: the calls of the model at a rank's rows, where they are known.

    Raises:
      ValueError: naming the draw, the user's line and the remedy.
    """
    rows, pairs = rows_of(asked.key), []
    if whole is None:
        try:
            whole, local = asked.traced(()), asked.traced(asked.everywhere)
        except Transformed:
            whole, local = asked.inlined(()), asked.inlined(asked.everywhere)
        pairs, noted = [(whole.draws, local.draws)], local.noted
    problems = [] if pairs else [why for each in whole.draws if (why := _whole_problem(each, rows))]
    if noted is None or len(noted) != len(whole.noted):
        raise ValueError(refusal(["what the model draws for a rank's rows is not known"]))
    pairs += [(a.draws, b.draws) for a, b in zip(whole.noted, noted, strict=True)]
    problems += [why for of_all, of_rank in pairs for why in _problems(of_all, of_rank, rows)]
    if problems:
        raise ValueError(refusal(problems))


def refusal(problems: Sequence[str]) -> str:
    """Why draws are refused."""
    return (
        'draws="rows": '
        + "; ".join(dict.fromkeys(problems))
        + '. Draw with the model\'s own keys, in a shape with rows as a dim of its own, or take draws="shards"'
    )


def _problems(of_all: Sequence[Drawn], of_rank: Sequence[Drawn], rows: int) -> Iterator[str]:
    if [each.name for each in of_all] != [each.name for each in of_rank]:
        yield "a rank's rows are drawn by other operations than the whole batch"
        return
    for whole, own in zip(of_all, of_rank, strict=True):
        if why := _problem(whole, own, rows):
            yield f"{own.name} of shape {own.shape} ({own.line or 'no line known'}) {why}"


def _problem(whole: Drawn, own: Drawn, rows: int) -> str | None:
    grown = [dim for dim, (a, b) in enumerate(zip(whole.shape, own.shape, strict=True)) if a != b]
    if own.name not in KNOWN:
        return "is not known to draw row by row"
    if not grown:
        like = own.by_rows and own.name in ("random_bits", "random_split") and rows in own.shape
        return (
            f"has a dim of {rows}, as many as a rank has rows, which are none: take another batch size"
            if like
            else None
        )
    if not own.by_rows:
        return "comes from a key that the code makes itself, which is the same on every rank"
    if own.name == "random_fold_in":
        return "makes keys of numbers that each rank begins anew: jax.random.split(key, rows) makes one for each row"
    fits = grown == [own.shape.index(rows)] if rows in own.shape else False
    return None if fits else f"has more rows in the whole batch, but no dim of its own for the {rows} rows of a rank"


def _whole_problem(each: Drawn, rows: int) -> str | None:
    """Of a draw of the whole batch's shape, of which a rank takes its part."""
    like = each.by_rows and each.name in ("random_bits", "random_split") and rows in each.shape
    if not like and each.name in KNOWN:
        return None
    where = f"{each.name} of shape {each.shape} ({each.line or 'no line known'})"
    return f"{where} of the loss has a dim of {rows}, as many as a rank has rows: take another batch size"
