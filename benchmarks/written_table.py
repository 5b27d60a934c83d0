"""A table that a script makes, in a page of the documentation between two marks."""

from pathlib import Path


def between(page: Path, name: str) -> tuple[str, str, str]:
    """What stands before the marks of a name, between them, and after.

    Raises:
      ValueError: when the page has no such marks.
    """
    before, begin, rest = page.read_text("utf-8").partition(f"<!-- {name}: begin -->\n")
    inside, end, after = rest.partition(f"<!-- {name}: end -->\n")
    if not begin or not end:
        raise ValueError(f"{page} has no place for {name!r}")
    return before + begin, inside, end + after


def written(page: Path, name: str, table: str) -> None:
    """Put the table in the place of the one that was there."""
    before, _, after = between(page, name)
    page.write_text(f"{before}\n{table}\n\n{after}", "utf-8")
