"""Ranks as threads of one process: a transport that finds faults which a real one may hide."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cupyflash.parallel._transport import Message

_SECONDS = 60.0  # that no message takes


class ThreadTransport:
    """Messages move while both ends wait: what is read sooner is NaN, and what is overwritten sooner is lost."""

    def __init__(self, rank: int, size: int, boxes: dict[tuple[int, int], queue.Queue[Any]]) -> None:
        self.rank, self.size, self._boxes = rank, size, boxes

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> _Late:
        taken = []
        for peer, array in sends:
            taken.append(threading.Event())
            self._boxes[self.rank, peer].put((array, taken[-1]))
        for _, array in receives:
            array.reshape(-1).view(np.uint8)[...] = 0xFF  # NaN in any float dtype
        return _Late([(self._boxes[peer, self.rank], array) for peer, array in receives], taken)


class _Late:
    def __init__(self, receives: list[tuple[queue.Queue[Any], Any]], taken: list[threading.Event]) -> None:
        self._receives, self._taken = receives, taken

    def wait(self) -> None:
        for box, array in self._receives:
            sent, taken = box.get(timeout=_SECONDS)
            assert sent.shape == array.shape and sent.dtype == array.dtype
            array[...] = sent
            taken.set()
        for taken in self._taken:
            assert taken.wait(_SECONDS)


def run(size: int, of_rank: Callable[[Any], Any]) -> list[Any]:
    """What `of_rank(transport)` returns on each of so many ranks; the first error that any of them raised."""
    boxes = {(a, b): queue.Queue() for a in range(size) for b in range(size)}
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            results[rank] = of_rank(ThreadTransport(rank, size, boxes))
        except BaseException as error:
            errors.append(error)
            for peer in range(size):
                boxes[rank, peer].put((None, None))  # nobody waits for what will not come

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
