"""What the schemes ask of an engine that moves arrays: who I am, and one way to send and receive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from cupyflash._errors import refusal

Message = tuple[int, Any]  # the other rank, and a C-contiguous array


class Transfer(Protocol):
    """Messages under way. It holds their arrays until it is waited for.

    Examples
    --------
    What an engine returns whose messages are there at once:

    >>> class Done:
    ...     def wait(self) -> None: ...
    >>> Done().wait()
    """

    def wait(self) -> None:
        """Return when what was received may be read and what was sent may be written, by work that is queued next.

        On a GPU that is an order between streams, and the host need not wait.
        """
        ...


class Transport(Protocol):
    """Moves arrays between the ranks of a group.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> alone = SimpleNamespace(rank=0, size=1)  # a group of one sends nothing
    """

    @property
    def rank(self) -> int:
        """Which of the group's processes this one is, from 0."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Transfer:
        """Start sending and receiving, and return without waiting: while the messages travel the caller computes.

        A message is a pair of the other rank and a C-contiguous array. Arrays are sent as they are when the work that
        is queued before the call is done. All ranks call `exchange` in an order that matches; what one rank sends to
        another arrives in the order of sending.
        """
        ...


def check_messages(transport: str, messages: Sequence[Message], kind: type, accepted: str) -> None:
    """All of them are of the kind that this transport moves."""
    for _, array in messages:
        if not isinstance(array, kind):
            module, name = type(array).__module__.partition(".")[0], type(array).__name__
            raise TypeError(refusal(f"{transport}.exchange", "array", f"is a {module} {name}", accepted))
