"""Programs, each in a fork of a process that has made the imports that all of them make.

`python forked_programs.py`: reads a line of JSON per program, [source, folder, seconds], and answers with one, [exit status,
end of its standard error]. The process itself starts no backend of JAX and no thread.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
import warnings

IMPORTS = "import axonml_jax, flax.linen, flax.nnx, jax.numpy, numpy, optax"
LONGEST = 3000


class ForkedPrograms:
    """That process, from outside; a context.

    Args:
      environ: its variables, and those of all programs.
    """

    def __init__(self, environ):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen([sys.executable, __file__], env=environ, **pipes)

    def run(self, source, folder, seconds=300):
        """Run a program in a folder. Returns its exit status, -9 where it took longer, and the end of its standard error."""
        self._process.stdin.write(json.dumps([source, str(folder), seconds]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


def become(source, folder, errors):
    """Be the program, to its end."""
    os.chdir(folder)
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for own, number in ((nothing, 0), (nothing, 1), (errors, 2)):
        os.dup2(own, number)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode) for number, mode in ((0, "r"), (1, "w"), (2, "w")))
    sys.argv, sys.path[0] = ["-c"], ""
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    warnings.simplefilter("error", UserWarning)
    try:
        exec(compile(source, "<page>", "exec"), main.__dict__)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def ended(pid, seconds):
    """The exit status of a program, which is killed with all that it started when it takes longer."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -9


def serve():
    """Answer until there is nothing more to read."""
    exec(IMPORTS, {})
    warnings.filterwarnings("ignore", "os.fork.. was called", RuntimeWarning)
    for line in sys.stdin:
        source, folder, seconds = json.loads(line)
        with tempfile.TemporaryFile() as errors:
            if not (pid := os.fork()):
                become(source, folder, errors.fileno())
            status = ended(pid, seconds)
            errors.seek(0)
            said = errors.read().decode(errors="replace")[-LONGEST:]
        print(json.dumps([status, said]), flush=True)


if __name__ == "__main__":
    serve()
