"""SIGTERM as a question, asked between two steps and answered alike by all processes."""

import signal
import threading

import jax


class Preemption:
    """While entered, SIGTERM does not end this process: it asks the run to stop after a step.

    Among several processes JAX's coordinator agrees on the step: a signal to one of them is enough.

    Attributes:
      asked: whether the run was asked to stop.
    """

    def __init__(self):
        self.asked = False
        self._alone = jax.process_count() == 1
        self._before = None

    def __enter__(self) -> "Preemption":
        # With several processes JAX has a handler of its own, in C++, that tells the coordinator; one in Python would hide it.
        if self._alone and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *exception):
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def stop_after(self, step: int) -> bool:
        """Whether to stop after this step; the same in all processes. Every one must ask after every step."""
        if not self._alone:
            from jax.experimental import multihost_utils

            self.asked = self.asked or multihost_utils.reached_preemption_sync_point(step)
        return self.asked

    def _note(self, number, frame):
        self.asked = True
