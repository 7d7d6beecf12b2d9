"""A thread in which messages travel while the caller computes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from cupyflash.parallel._transport import Message


class Worker:
    """Moves what it is given, one after the other.

    A daemon: a process that ends does not wait for messages that will not come, as a thread pool makes it do.
    """

    def __init__(self, name: str) -> None:
        self._given: queue.SimpleQueue[tuple[Future[None], Callable[[], None]]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def start(self, move: Callable[[], None], messages: Sequence[Message]) -> Moving:
        moved: Future[None] = Future()
        self._given.put((moved, move))
        return Moving(moved, messages)

    def _work(self) -> None:
        while True:
            moved, move = self._given.get()
            try:
                move()
            except BaseException as error:  # the caller's `wait` raises it
                moved.set_exception(error)
            else:
                moved.set_result(None)


class Moving:
    """Messages that a worker moves, and their arrays."""

    def __init__(self, moved: Future[None], messages: Sequence[Message]) -> None:
        self._moved, self._messages = moved, messages

    def wait(self) -> None:
        self._moved.result()
        self._messages = ()
