"""Signals sent to the launcher, kept until its loop looks."""

import signal
import socket

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Interrupts:
    """While entered, signals that would end this process are collected instead, and wake whoever selects on `fileno`.

    A signal that was ignored before (SIGHUP under nohup, SIGINT in a shell's background) stays ignored.

    Attributes:
      received: the signals that came, in order.
    """

    def __init__(self):
        self.received: list[signal.Signals] = []
        self._before: dict[int, object] = {}

    def __enter__(self) -> "Interrupts":
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        for number in _STOPPING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._receive)
        # Python tells the wakeup descriptor only of signals that have a handler.
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda number, frame: None)
        return self

    def __exit__(self, *exception):
        for number, handler in self._before.items():
            if handler is not None:  # None: C code had set it, and Python cannot put it back
                signal.signal(number, handler)  # pyright: ignore[reportArgumentType]
        signal.set_wakeup_fd(self._wakeup_before)
        self._wake.close()
        self._woken.close()

    def fileno(self) -> int:
        """A descriptor that becomes readable when a signal comes or a child ends."""
        return self._woken.fileno()

    def drain(self) -> None:
        """Make `fileno` unreadable again."""
        try:
            while self._woken.recv(4096):
                pass
        except BlockingIOError:
            pass

    def _receive(self, number, frame):
        self.received.append(signal.Signals(number))
