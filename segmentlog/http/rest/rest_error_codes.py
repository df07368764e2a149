"""Error codes of the REST Proxy: the HTTP status times 100, plus a number."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from segmentlog import errors
from segmentlog.http.error_responses import Forbidden, HttpProblem, client_message, problem_of
from segmentlog.schemas.registry_errors import SchemaError

BAD_REQUEST: Final = 40002
FORBIDDEN: Final = 40301
TOPIC_NOT_FOUND: Final = 40401
PARTITION_NOT_FOUND: Final = 40402
INSTANCE_NOT_FOUND: Final = 40403
UNKNOWN_TOPIC_OR_PARTITION: Final = 40403
FORMAT_MISMATCH: Final = 40601
INSTANCE_EXISTS: Final = 40902
ILLEGAL_STATE: Final = 40903
KEY_SCHEMA_MISSING: Final = 42201
VALUE_SCHEMA_MISSING: Final = 42202
CONVERSION_FAILED: Final = 42203
INVALID_CONSUMER_CONFIG: Final = 42204
INVALID_SCHEMA: Final = 42205
INVALID_PAYLOAD: Final = 42206
NOT_SERIALIZED: Final = 42207
FAILED: Final = 50002
RETRIABLE: Final = 50003

_CODES: Final[tuple[tuple[type[BaseException], HTTPStatus, int], ...]] = (
    (errors.UnknownTopic, HTTPStatus.NOT_FOUND, TOPIC_NOT_FOUND),
    (errors.InvalidTopicName, HTTPStatus.NOT_FOUND, TOPIC_NOT_FOUND),
    (errors.ReadOnlyStore, HTTPStatus.FORBIDDEN, FORBIDDEN),
    (errors.ConsumerFenced, HTTPStatus.CONFLICT, ILLEGAL_STATE),
    (errors.GroupInUse, HTTPStatus.CONFLICT, ILLEGAL_STATE),
    (errors.GroupNotEmpty, HTTPStatus.CONFLICT, ILLEGAL_STATE),
    (errors.InvalidConfig, HTTPStatus.UNPROCESSABLE_ENTITY, INVALID_CONSUMER_CONFIG),
    (errors.InvalidRecord, HTTPStatus.UNPROCESSABLE_ENTITY, INVALID_PAYLOAD),
    (SchemaError, HTTPStatus.UNPROCESSABLE_ENTITY, INVALID_SCHEMA),
)
_ADMIN_CODES: Final[tuple[tuple[type[BaseException], HTTPStatus, int], ...]] = (
    (errors.UnknownTopic, HTTPStatus.NOT_FOUND, UNKNOWN_TOPIC_OR_PARTITION),
    (errors.TopicExists, HTTPStatus.BAD_REQUEST, BAD_REQUEST),
    (errors.InvalidTopicName, HTTPStatus.BAD_REQUEST, BAD_REQUEST),
    (errors.InvalidConfig, HTTPStatus.BAD_REQUEST, BAD_REQUEST),
    (errors.ReadOnlyStore, HTTPStatus.FORBIDDEN, FORBIDDEN),
    (errors.InvalidRecord, HTTPStatus.UNPROCESSABLE_ENTITY, INVALID_PAYLOAD),
    (SchemaError, HTTPStatus.UNPROCESSABLE_ENTITY, INVALID_SCHEMA),
)


def v2_problem(error: BaseException) -> HttpProblem:
    """Return the REST v2 response for an error."""
    return _numbered(error, _CODES)


def v3_problem(error: BaseException) -> HttpProblem:
    """Return the REST v3 response for an error."""
    return _numbered(error, _ADMIN_CODES)


def native_problem(error: BaseException) -> HttpProblem:
    """Return the response of segmentlog's own endpoints for an error. Its code is the status."""
    if isinstance(error, errors.InvalidTopicName):
        return HttpProblem(HTTPStatus.NOT_FOUND, client_message(error))
    return problem_of(error)


def record_code(error: BaseException) -> int:
    """Return the error code for one record that was not appended."""
    problem = v2_problem(error)
    if problem.status == HTTPStatus.INTERNAL_SERVER_ERROR:
        return FAILED
    return problem.error_code


def _numbered(error: BaseException, codes: tuple[tuple[type[BaseException], HTTPStatus, int], ...]) -> HttpProblem:
    if isinstance(error, Forbidden) and error.error_code == HTTPStatus.FORBIDDEN:
        return Forbidden(error.message, error_code=FORBIDDEN)
    if isinstance(error, HttpProblem):
        return error
    for kind, status, code in codes:
        if isinstance(error, kind):
            return HttpProblem(status, client_message(error), error_code=code)
    problem = problem_of(error)
    if problem.status == HTTPStatus.INTERNAL_SERVER_ERROR:
        problem.error_code = FAILED
    elif problem.status in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.INSUFFICIENT_STORAGE, HTTPStatus.BAD_GATEWAY):
        problem.error_code = RETRIABLE
    return problem


def unknown_partition(topic: str, partition: object) -> HttpProblem:
    """Return the response (404) for a partition that the topic does not have."""
    return HttpProblem(
        HTTPStatus.NOT_FOUND, f"topic {topic!r} has no partition {partition}", error_code=PARTITION_NOT_FOUND
    )
