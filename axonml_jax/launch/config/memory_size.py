"""Sizes of memory as people write them on a command line."""

import argparse


def memory_size(text: str) -> float:
    """Bytes of a size as people write it.

    >>> memory_size("16GiB") == 16 * 2**30, memory_size("80GB"), memory_size("512")
    (True, 80000000000.0, 512.0)

    Raises:
      argparse.ArgumentTypeError: for anything else.
    """
    units = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "": 1}
    number = text.rstrip("KMGTiB ")
    unit = text[len(number) :].strip()
    try:
        return float(number) * units[unit]
    except (KeyError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} must be a size such as 16GiB or 80GB") from None
