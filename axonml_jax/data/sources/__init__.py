"""Files as datasets: text, JSON lines, Parquet, each a room with the same doors."""
