"""SIGTERM and Ctrl-C as a question, asked between two steps and answered alike by all processes."""

import os
import signal
import sys
import threading

import jax

_SAID = b"\naxonml_jax: Ctrl-C: the run stops after this step and is saved, if it saves at all; Ctrl-C again ends it at once\n"


class Preemption:
    """While entered, neither SIGTERM nor the first Ctrl-C ends this process: they ask the run to stop after a step.

    Among several processes JAX's coordinator agrees on the step: a signal to one of them is enough.

    Attributes:
      asked: whether the run was asked to stop.
      interrupted: whether it was Ctrl-C, in this process.
    """

    def __init__(self):
        self.asked = self.interrupted = False
        self._alone = jax.process_count() == 1
        self._before = {}

    def __enter__(self) -> "Preemption":
        if threading.current_thread() is not threading.main_thread():
            return self
        # With several processes JAX has a handler of its own, in C++, that tells the coordinator; one in Python would hide it.
        if self._alone:
            self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._note)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as in a shell's background
            self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *exception):
        for number, handler in self._before.items():
            if handler is not None:  # None: C code had set it, and Python cannot put it back
                signal.signal(number, handler)

    def stop_after(self, step: int) -> bool:
        """Whether to stop after this step; the same in all processes. Every one must ask after every step."""
        if not self._alone:
            from jax.experimental import multihost_utils

            self.asked = self.asked or multihost_utils.reached_preemption_sync_point(step)
        return self.asked

    def _note(self, number, frame):
        self.asked = True

    def _interrupt(self, number, frame):
        self.interrupted = True
        # The next one needs no Python, which may be waiting for a device.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, _SAID)
        if self._alone:
            self.asked = True
        else:
            os.kill(os.getpid(), signal.SIGTERM)
