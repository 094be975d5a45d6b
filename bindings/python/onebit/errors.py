"""What goes wrong, as exceptions."""

from onebit import _native
from onebit._native import Status


class Error(RuntimeError):
    """A call of the library failed.

    status: the `Status` that it returned
    message: what the library says of it, with the argument and its value where one is at fault
    """

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(status, message)
        self.status = status
        self.message = message

    def __str__(self) -> str:
        return f"{self.status.name}: {self.message}"


class OnebitWarning(UserWarning):
    """All is well done, but something wants to be looked at."""


def last_message():
    """The library's message about this thread's latest failure."""
    return _native.library().onebit_last_error().decode(errors="replace")


def check(code):
    """The status of a call; raises `Error` for all but OK, IN_PROGRESS, WARNING and SKIPPED."""
    status = Status(code)
    if status >= Status.OK or status == Status.SKIPPED:
        return status
    raise Error(status, last_message())


def wrong(message):
    """The error of an argument that is wrong before the library sees it."""
    return Error(Status.ERROR_ARGUMENT, message)
