"""A pytest plugin that writes which functions of the package each test enters, also in processes that it starts, and its cost.

    AXONML_REACHED=reached.tsv PYTHONPATH=benchmarks python -m pytest -p reached

Lines of the file: a test, a file of the package, a function, its first line. `reached.tsv.seconds` has the processor's seconds
of every test. Python 3.12 or newer (`sys.monitoring`); functions are seen once per test, which costs nothing that can be
measured. Processes that a test starts are seen where they run this file at their start (`sitecustomize.py`, which
`mutants.py` writes).
"""

import os
import sys

PACKAGE = f"{os.sep}axonml_jax{os.sep}"
TOOL = 4


def watch(path: str) -> None:
    """Appends every first entry of a function of the package in a test to the file."""
    events, seen = sys.monitoring, set()
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def entered(code, _):
        at = code.co_filename.rfind(PACKAGE)
        if at >= 0:
            test = os.environ.get("PYTEST_CURRENT_TEST", "").rsplit(" (", 1)[0]
            key = (test, code.co_filename[at + 1 :], code.co_qualname, code.co_firstlineno)
            if key not in seen:
                seen.add(key)
                os.write(file, ("\t".join(map(str, key)) + "\n").encode())
        return events.DISABLE

    if events.get_tool(TOOL) is None:
        events.use_tool_id(TOOL, "reached")
        events.register_callback(TOOL, events.events.PY_START, entered)
        events.set_events(TOOL, events.events.PY_START)


if os.environ.get("AXONML_REACHED"):
    watch(os.environ["AXONML_REACHED"])

    if "pytest" in sys.modules:
        import pytest

        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_protocol(item):
            """Every test sees all functions anew, and its seconds are written, those of its processes too."""
            sys.monitoring.restart_events()
            before = os.times()
            result = yield
            spent = sum(os.times()[:4]) - sum(before[:4])
            with open(os.environ["AXONML_REACHED"] + ".seconds", "a", encoding="utf-8") as file:
                file.write(f"{item.nodeid}\t{spent:.2f}\n")
            return result
