"""What is told to who asked for what cannot be had: a status, a code, and a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

from segmentlog import errors
from segmentlog.security.security_errors import SecurityFileError


class HttpProblem(errors.SegmentlogError):
    """A request is answered with this. ``error_code`` is what clients of an API know it by; by default the status."""

    def __init__(
        self, status: int, message: str, *, error_code: int | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(status, message)
        self.status, self.message = int(status), message
        self.error_code = int(status) if error_code is None else error_code
        self.headers = dict(headers or {})

    def __str__(self) -> str:
        return self.message


class Forbidden(HttpProblem):
    """The rules of access do not allow it, or writes are not allowed at all."""

    def __init__(self, message: str, *, error_code: int | None = None) -> None:
        super().__init__(HTTPStatus.FORBIDDEN, message, error_code=error_code)


INTERNAL: Final = "internal error: the log of the server says more"
_OBJECT_STORE: Final = "the object store"

_STATUSES: Final[tuple[tuple[type[BaseException], HTTPStatus], ...]] = (
    # The first that fits.
    (errors.UnknownTopic, HTTPStatus.NOT_FOUND),
    (errors.TopicExists, HTTPStatus.CONFLICT),
    (errors.RecordTooLarge, HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
    (errors.OffsetOutOfRange, HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE),
    (errors.LogTruncated, HTTPStatus.GONE),
    (errors.InvalidConfig, HTTPStatus.UNPROCESSABLE_ENTITY),
    (errors.InvalidTopicName, HTTPStatus.UNPROCESSABLE_ENTITY),
    (errors.InvalidRecord, HTTPStatus.UNPROCESSABLE_ENTITY),
    (errors.OtherInput, HTTPStatus.UNPROCESSABLE_ENTITY),
    (errors.ReadOnlyStore, HTTPStatus.FORBIDDEN),
    (errors.GroupNotEmpty, HTTPStatus.CONFLICT),
    (errors.GroupHeld, HTTPStatus.CONFLICT),
    (errors.ConsumerBusy, HTTPStatus.CONFLICT),
    (errors.ConsumerFenced, HTTPStatus.CONFLICT),
    (errors.ProducerFenced, HTTPStatus.CONFLICT),
    (errors.ProducerHeld, HTTPStatus.CONFLICT),
    (errors.OutOfOrderSequence, HTTPStatus.CONFLICT),
    (errors.TransactionAborted, HTTPStatus.CONFLICT),
    (errors.DiskFull, HTTPStatus.INSUFFICIENT_STORAGE),
    (errors.PartitionBusy, HTTPStatus.SERVICE_UNAVAILABLE),
    (errors.ProducerBusy, HTTPStatus.SERVICE_UNAVAILABLE),
    (errors.GrantExhausted, HTTPStatus.SERVICE_UNAVAILABLE),
    (errors.NotShipped, HTTPStatus.SERVICE_UNAVAILABLE),
    (errors.StoreFenced, HTTPStatus.SERVICE_UNAVAILABLE),
    (errors.StoreClosed, HTTPStatus.SERVICE_UNAVAILABLE),
    (errors.ObjectStoreError, HTTPStatus.BAD_GATEWAY),
    (errors.LocalError, HTTPStatus.SERVICE_UNAVAILABLE),
    (SecurityFileError, HTTPStatus.INTERNAL_SERVER_ERROR),
)


def problem_of(error: BaseException) -> HttpProblem:
    """What an error of the library comes to. Damage and what nobody expected is 500."""
    if isinstance(error, HttpProblem):
        return error
    for kind, status in _STATUSES:
        if isinstance(error, kind):
            return HttpProblem(status, words_of(error))
    return HttpProblem(HTTPStatus.INTERNAL_SERVER_ERROR, words_of(error))


def words_of(error: BaseException) -> str:
    """What is told of an error. What nobody expected may say anything, and says it to the log alone.

    Where the store lies is in the words of some: `Site.told` takes that out.
    """
    if isinstance(error, SecurityFileError):
        return "internal error: a file of users, rules or keys cannot be used; the log of the server says more"
    if isinstance(error, errors.ObjectStoreError | errors.ShippingRefused):
        return str(error).replace(error.url, _OBJECT_STORE) if error.url else str(error)
    if isinstance(error, errors.SegmentlogError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"internal error: {error.strerror}"  # without the names of files
    return INTERNAL
