"""Parquet files as somebody else has written them: cut, changed in their footers and their pages, and made to lie."""

import random
import struct
from pathlib import Path

from mutations import of_bytes

_MAGIC = b"PAR1"


def parquet_files(folder: Path) -> list[bytes]:
    """Valid files of several encodings, compressions and kinds of columns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = {
        "text": [f"the cat sat on mat {i % 5}" * (i % 7) for i in range(60)],
        "tokens": [[i, i + 1, 2 * i] if i % 3 else None for i in range(60)],
        "id": list(range(60)),
        "x": [i / 3 for i in range(60)],
        "flag": [i % 2 == 0 for i in range(60)],
        "nested": [{"a": i, "b": [str(i)]} for i in range(60)],
        "raw": [bytes([i]) * 3 for i in range(60)],
    }
    table, found = pa.table(rows), []
    for options in (
        {"compression": "none", "use_dictionary": False},
        {"compression": "snappy", "row_group_size": 25, "write_page_index": True},
        {"compression": "zstd", "data_page_version": "2.0", "write_page_checksum": True},
        {"compression": "gzip", "use_dictionary": False, "column_encoding": {"id": "DELTA_BINARY_PACKED"}},
        {"compression": "none", "row_group_size": 7, "store_schema": False},
    ):
        pq.write_table(table, folder / "made.parquet", **options)
        found.append((folder / "made.parquet").read_bytes())
    (folder / "made.parquet").unlink()
    return found


def changed_file(data: bytes, draw: random.Random) -> bytes:
    """One of them changed: anywhere, in its footer alone, in its pages alone, or in what says how long the footer is."""
    length = struct.unpack("<I", data[-8:-4])[0]
    pages, footer = data[: -8 - length], data[-8 - length : -8]
    kind = draw.random()
    if kind < 0.25:
        return of_bytes(data, draw)
    if kind < 0.6:
        footer = of_bytes(footer, draw) if draw.random() < 0.5 else _flipped(footer, draw)
        return pages + footer + struct.pack("<I", len(footer)) + _MAGIC
    if kind < 0.9:
        pages = _MAGIC + _flipped(pages[4:], draw) if draw.random() < 0.7 else of_bytes(pages, draw)
        return pages + data[-8 - length :]
    said = draw.choice([0, 1, 8, length - 1, length + 1, len(data), 2**31 - 1, 2**31, 2**32 - 1])
    return data[:-8] + struct.pack("<I", said) + draw.choice([_MAGIC, _MAGIC, b"PARE", b"\0\0\0\0"])


def read_parquet(folder: Path, prepared: list[bytes], draw: random.Random):
    """The first, the last and some other rows, of all columns or of two."""
    from axonml_jax.data.sources import ParquetFiles

    (folder / "it.parquet").write_bytes(changed_file(draw.choice(prepared), draw))
    found = ParquetFiles(folder / "it.parquet", fields=draw.choice([None, ["text", "id"]]))
    if count := len(found):
        found.__getitems__(sorted({0, count - 1, *(draw.randrange(count) for _ in range(3))}))


def _flipped(data: bytes, draw: random.Random) -> bytes:
    """With a few bytes of other values, those that often mean something among them."""
    changed = bytearray(data)
    for _ in range(draw.choice([1, 1, 1, 2, 4, 16])):
        changed[draw.randrange(len(changed))] = draw.choice([0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)])
    return bytes(changed)
