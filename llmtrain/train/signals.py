"""Stops a run on a signal. It reaches the ranks at different times, or only one of them: they agree on a step.

Launchers and batch systems differ in which signals they send (SIGTERM, SIGUSR1, SIGUSR2, SIGHUP, SIGINT) and to whom,
so all of these mean the same on any rank: finish the step, save, and exit with code 75.
"""

from __future__ import annotations

import signal
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from types import FrameType
from typing import TYPE_CHECKING, TextIO

from llmtrain.errors import Exit
from llmtrain.launch.authentication import MessageAuthenticator, read_verified
from llmtrain.system.stops import STOP_SIGNALS, after_step, leave, say
from llmtrain.system.streams import ERASE_LINE, is_terminal

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

KEPT_DECISIONS = 2048
"""Rank 0 is never this many steps ahead of another: a CUDA device queues 1024 launches, and a step has several."""

REQUEST = "request"
"""Key of the store under which a rank reports that a signal asked it to stop."""


class StopSignals:
    """The signals that this process has received. Must be created in the main thread, before anything slow."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        """The first signal."""
        self._saved: tuple[int, TextIO] | None = None
        """The last step, which is saved, and the user's standard error."""
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # ignored signals stay ignored (nohup)
                signal.signal(number, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # a launcher may block them until now

    def _handle(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT:
            # Left to the kernel, since a process that waits in a collective runs no handler.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        if self.received is None:
            self.received = signal.Signals(number)
        self._exit_if_saved()

    def exit_on_signal(self, step: int, stderr: TextIO) -> None:
        """Makes the process exit at once on a signal, past or future.

        step: the last one, which is saved. stderr: standard error before it was redirected to the rank's log.
        """
        self._saved = step, stderr
        self._exit_if_saved()

    def _exit_if_saved(self) -> None:
        if self._saved is not None and self.received is not None:
            step, stderr = self._saved
            # There may be a spinner on this line.
            say((ERASE_LINE if is_terminal(stderr) else "") + after_step(self.received, step), stderr.fileno())
            leave(Exit.RESUME)


class StopAgreement:
    """Makes all ranks stop after the same step, whichever of them received the signal.

    Rank 0 decides for each step and writes the decision to the rendezvous store; the others read it there. A thread
    does that one step ahead, while the rank trains, so that no rank waits for a round trip, a collective or a
    device; the price is that a run ends one step later.
    """

    def __init__(self, signals: StopSignals, authenticator: MessageAuthenticator, attempt: int = 0) -> None:
        """Called by all ranks of the process group.

        authenticator: the same for all ranks. attempt: increases if a run repeats steps, whose old decisions must not
        be read.
        """
        from torch import distributed as dist

        from llmtrain.engines.runtime.distributed import store

        self.signals = signals
        self._authenticator = authenticator
        self._attempt = attempt
        self.rank = dist.get_rank()
        # A separate connection: on a shared one, a thread that waits for a key blocks the others.
        connection = store(f"stop/{attempt}").clone() if dist.get_world_size() > 1 else None  # type: ignore[attr-defined]
        self.store: Store | None = connection
        """The rendezvous store; None for a single rank."""
        self.stopped_by: signal.Signals | None = None
        """The signal that all ranks stop on, once they have agreed."""
        self._requests: SimpleQueue[int | None] = SimpleQueue()
        self._decisions: SimpleQueue[int | BaseException] = SimpleQueue()
        self._thread: Thread | None = None

    def should_stop(self, step: int) -> bool:
        """Whether the ranks stop after `step` steps. Each rank asks for the same steps in order.

        Raises the error of the store if rank 0 is gone.
        """
        number = int(self.signals.received or 0) if self.store is None else self._decision(step)
        self.stopped_by = signal.Signals(number) if number else None
        return self.stopped_by is not None

    def close(self) -> None:
        """Ends the thread, after the last requested decision. For ranks that continue afterwards."""
        if self._thread is not None:
            self._requests.put(None)
            self._thread.join()
            self._thread = None

    def _decision(self, step: int) -> int:
        """Returns the number of the signal to stop on, or 0, and requests the decision of the next step."""
        if self._thread is None:
            self._thread = Thread(target=self._serve_requests, name="stop decisions", daemon=True)
            self._thread.start()
            self._requests.put(step)
        self._requests.put(step + 1)
        decision = self._decisions.get()
        if isinstance(decision, BaseException):
            raise decision
        return decision

    def _serve_requests(self) -> None:
        """Makes the requested decisions, in a thread."""
        # Signals belong to the main thread: two threads of a stopped rank would handle its dump and its end at once.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            while (step := self._requests.get()) is not None:
                self._decisions.put(self._decide(step))
        except Exception as error:  # of the connection; raised in the training thread if it asks again
            self._decisions.put(error)

    def _decide(self, step: int) -> int:
        """Returns rank 0's decision for a step: decided now on rank 0, and read when available on the others."""
        assert self.store is not None
        received = int(self.signals.received or 0)
        if self.rank != 0:
            if received:
                self.store.set(REQUEST, self._signed(REQUEST, received))
            return int(read_verified(self.store, str(step), self._authenticator, self._purpose(str(step))))
        if not received and self.store.check([REQUEST]):
            received = self._requested_signal()
        self.store.set(str(step), self._signed(str(step), received))
        self.store.delete_key(str(step - KEPT_DECISIONS))
        return received

    def _requested_signal(self) -> int:
        """Returns the signal that another rank received, or 0 if the text was forged."""
        assert self.store is not None
        with suppress(ValueError):
            return int(self._authenticator.verify(self._purpose(REQUEST), self.store.get(REQUEST)))
        return 0

    def _signed(self, key: str, number: int) -> str:
        return self._authenticator.sign(self._purpose(key), str(number))

    def _purpose(self, key: str) -> str:
        return f"stop {self._attempt} {key}"
