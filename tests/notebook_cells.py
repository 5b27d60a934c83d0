"""The code cells of a notebook, run in one process as a notebook would, and what each of them shows.

    python tests/notebook_cells.py examples/tour.ipynb

Prints a list, JSON, with an entry for every code cell: its `stream`, what it has printed, and its `result`, the value of a last
expression by kind of content. It needs no Jupyter; what is kept in the file comes from Jupyter itself.
"""

import ast
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any


def code_cells(path: str | Path) -> list[dict[str, Any]]:
    """The cells of a notebook that hold code, as they are in the file."""
    cells = json.loads(Path(path).read_text("utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def kept(cell: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a cell's outputs in the file, in the form of `run`."""
    stream = "".join("".join(out["text"]) for out in cell["outputs"] if out["output_type"] == "stream")
    results = [out["data"] for out in cell["outputs"] if out["output_type"] == "execute_result"]
    return {"stream": stream, "result": {kind: "".join(text) for data in results for kind, text in data.items()}}


def run(path: str | Path) -> list[dict[str, Any]]:
    """Run all code cells in order."""
    names, outputs = {"__name__": "__main__"}, []
    for number, cell in enumerate(code_cells(path), start=1):
        body = ast.parse(source(cell), filename=f"cell {number}").body
        last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(ast.Module(body, []), f"cell {number}", "exec"), names)
            value = last and eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
        result = {} if value is None else {"text/plain": repr(value)}
        if hasattr(value, "_repr_html_"):
            result["text/html"] = value._repr_html_()
        outputs.append({"stream": printed.getvalue(), "result": result})
    return outputs


if __name__ == "__main__":
    json.dump(run(sys.argv[1]), sys.stdout)
