"""Errors as HTTP responses: a status, an error code and a message for the client."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

from segmentlog import errors
from segmentlog.security.security_errors import SecurityFileError


class HttpProblem(errors.SegmentlogError):
    """An error response: HTTP status, message and the error code for API clients (default: the status)."""

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
    """The access rules deny the operation, or the server does not allow writes. Status 403."""

    def __init__(self, message: str, *, error_code: int | None = None) -> None:
        super().__init__(HTTPStatus.FORBIDDEN, message, error_code=error_code)


INTERNAL: Final = "internal error: see the log of the server"
_OBJECT_STORE: Final = "the object store"

_STATUSES: Final[tuple[tuple[type[BaseException], HTTPStatus], ...]] = (
    # The first matching class decides.
    (errors.UnknownTopic, HTTPStatus.NOT_FOUND),
    (errors.TopicExists, HTTPStatus.CONFLICT),
    (errors.RecordTooLarge, HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
    (errors.OffsetOutOfRange, HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE),
    (errors.LogTruncated, HTTPStatus.GONE),
    (errors.InvalidConfig, HTTPStatus.UNPROCESSABLE_ENTITY),
    (errors.InvalidTopicName, HTTPStatus.UNPROCESSABLE_ENTITY),
    (errors.InvalidRecord, HTTPStatus.UNPROCESSABLE_ENTITY),
    (errors.InputMismatch, HTTPStatus.UNPROCESSABLE_ENTITY),
    (errors.ReadOnlyStore, HTTPStatus.FORBIDDEN),
    (errors.GroupNotEmpty, HTTPStatus.CONFLICT),
    (errors.GroupInUse, HTTPStatus.CONFLICT),
    (errors.ConsumerBusy, HTTPStatus.CONFLICT),
    (errors.ConsumerFenced, HTTPStatus.CONFLICT),
    (errors.ProducerFenced, HTTPStatus.CONFLICT),
    (errors.ProducerNameInUse, HTTPStatus.CONFLICT),
    (errors.OutOfOrderSequence, HTTPStatus.CONFLICT),
    (errors.TransactionAborted, HTTPStatus.CONFLICT),
    (errors.DiskFull, HTTPStatus.INSUFFICIENT_STORAGE),
    (errors.PartitionBusy, HTTPStatus.SERVICE_UNAVAILABLE),
    (errors.ProducerBusy, HTTPStatus.SERVICE_UNAVAILABLE),
    (errors.OffsetGrantExhausted, HTTPStatus.SERVICE_UNAVAILABLE),
    (errors.ShipUnconfirmed, HTTPStatus.SERVICE_UNAVAILABLE),
    (errors.StoreFenced, HTTPStatus.SERVICE_UNAVAILABLE),
    (errors.StoreClosed, HTTPStatus.SERVICE_UNAVAILABLE),
    (errors.ObjectStoreError, HTTPStatus.BAD_GATEWAY),
    (errors.ProcessLimitError, HTTPStatus.SERVICE_UNAVAILABLE),
    (SecurityFileError, HTTPStatus.INTERNAL_SERVER_ERROR),
)


def problem_of(error: BaseException) -> HttpProblem:
    """Return the response for an error. Damage and unexpected errors become 500."""
    if isinstance(error, HttpProblem):
        return error
    for kind, status in _STATUSES:
        if isinstance(error, kind):
            return HttpProblem(status, client_message(error))
    return HttpProblem(HTTPStatus.INTERNAL_SERVER_ERROR, client_message(error))


def client_message(error: BaseException) -> str:
    """Return the message to show the client. The text of an unexpected exception goes to the log only.

    The message may contain the store's folder: `HttpContext.redact_paths` removes it.
    """
    if isinstance(error, SecurityFileError):
        return (
            "internal error: the server cannot use a file of users, access rules or TLS keys; see the log of the server"
        )
    if isinstance(error, errors.ObjectStoreError | errors.ShippingRefused):
        return str(error).replace(error.url, _OBJECT_STORE) if error.url else str(error)
    if isinstance(error, errors.SegmentlogError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"internal error: {error.strerror}"  # without file names
    return INTERNAL
