"""Exceptions that go wrong when they are shown, sent or used, and a worker that raises them."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from typing import Any, NoReturn

from roost import Worker


def fail(error: BaseException) -> NoReturn:
    raise error


class NoText(Exception):  # noqa: N818 - these are what they say
    def __str__(self) -> str:
        raise ValueError("no text")


class EndsInText(Exception):  # noqa: N818
    def __str__(self) -> str:
        raise SystemExit("text ends the process")


class TextIsNone(Exception):  # noqa: N818
    def __str__(self) -> str:
        return None  # type: ignore[return-value]


class NoRepr(Exception):  # noqa: N818
    def __repr__(self) -> str:
        raise ValueError("no repr")


class NoReduce(Exception):  # noqa: N818
    def __reduce__(self) -> Any:
        raise SystemExit("pickling ends the process")


class UnpicklesAsEnd(Exception):  # noqa: N818
    def __reduce__(self) -> Any:
        return fail, (SystemExit("unpickling ends the process"),)


class UnpicklesAsCancel(Exception):  # noqa: N818
    def __reduce__(self) -> Any:
        return fail, (KeyboardInterrupt("unpickling interrupts"),)


class UnpicklesAtHome(Exception):  # noqa: N818
    def __init__(self, text: str, home: int = 0) -> None:
        if home not in (0, os.getpid()):
            raise SystemExit("only at home")
        super().__init__(text)

    def __reduce__(self) -> Any:
        return UnpicklesAtHome, (self.args[0], os.getpid())


class TextAtHome(Exception):  # noqa: N818
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.home = os.getpid()

    def __str__(self) -> str:
        if self.home != os.getpid():
            raise SystemExit("only at home")
        return "the text at home"


class NoNotes(Exception):  # noqa: N818
    def add_note(self, _note: str, /) -> None:
        raise RuntimeError("no notes")


class NoAttributes(Exception):  # noqa: N818
    def __setattr__(self, name: str, value: object) -> None:
        raise RuntimeError("no attributes")


class NotesRaise(Exception):  # noqa: N818
    @property
    def __notes__(self) -> list[str]:
        raise RuntimeError("no notes to read")


class NewWithArguments(Exception):  # noqa: N818
    def __new__(cls, first: str, second: str) -> NewWithArguments:  # noqa: ARG004
        return super().__new__(cls, first)

    def __init__(self, first: str, _second: str) -> None:
        super().__init__(first)


class Lonely(BaseException):
    """Not even an Exception."""


ODD = {
    "NoText": lambda: NoText("x"),
    "EndsInText": lambda: EndsInText("x"),
    "TextIsNone": lambda: TextIsNone("x"),
    "NoRepr": lambda: NoRepr("what it says"),
    "NoReduce": lambda: NoReduce("what it says"),
    "UnpicklesAsEnd": lambda: UnpicklesAsEnd("what it says"),
    "UnpicklesAsCancel": lambda: UnpicklesAsCancel("what it says"),
    "UnpicklesAtHome": lambda: UnpicklesAtHome("what it says"),
    "TextAtHome": lambda: TextAtHome("x"),
    "NoNotes": lambda: NoNotes("what it says"),
    "NoAttributes": lambda: NoAttributes("what it says"),
    "NotesRaise": lambda: NotesRaise("what it says"),
    "NewWithArguments": lambda: NewWithArguments("what it says", "more"),
    "Lonely": lambda: Lonely("what it says"),
}


class Odd(Worker):
    def __init__(self, name: str = "") -> None:
        super().__init__()
        if name:
            raise ODD[name]()

    def fail(self, name: str) -> None:
        raise ODD[name]()

    def fail_with(self, text: str) -> None:
        raise NoReduce(text)

    def items(self, name: str) -> Iterator[int]:
        yield 0
        raise ODD[name]()


class OddAsync(Worker):
    async def fail(self, name: str) -> None:
        raise ODD[name]()

    async def items(self, name: str) -> AsyncIterator[int]:
        yield 0
        raise ODD[name]()
