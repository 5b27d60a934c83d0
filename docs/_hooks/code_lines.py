"""Lines of code, as the page on the training script counts them: those that hold code, without comments and docstrings.

`python docs/_hooks/code_lines.py FILE...` prints them; `tests/test_plan_table.py` fails while the page has others of ours.
"""

import ast
import io
import sys
import tokenize
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "training-script.md"
OWN = ("examples/training_script.py", "configs/gpt_fsdp.yaml")
DOCUMENTED = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
SILENT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENCODING, tokenize.ENDMARKER),
    *(tokenize.INDENT, tokenize.DEDENT),
}


def code_lines(path):
    """How many lines of a Python or YAML file hold code."""
    text = Path(path).read_text("utf-8")
    if Path(path).suffix != ".py":
        return sum(not line.strip().startswith("#") for line in text.splitlines() if line.strip())
    said = [
        node.body[0] for node in ast.walk(ast.parse(text)) if isinstance(node, DOCUMENTED) and ast.get_docstring(node)
    ]
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in SILENT]
    return len(
        _lines((token.start[0], token.end[0]) for token in tokens) - _lines((s.lineno, s.end_lineno) for s in said)
    )


def _lines(spans):
    return {line for first, last in spans for line in range(first, last + 1)}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(f"{code_lines(name):>6,}  {name}")
