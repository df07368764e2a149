"""What is asked about schemas, whatever subjects they are of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.responses import PlainTextResponse

from segmentlog.http.registry.registry_request import document, version_document
from segmentlog.schemas.subject_names import context_of

if TYPE_CHECKING:
    from segmentlog.http.registry.registry_request import Call


def every(call: Call) -> list[dict[str, Any]]:
    found = call.registry.schemas(
        call.query.get("subjectPrefix", ":*:"), deleted=call.flag("deleted"), latest_only=call.flag("latestOnly")
    )
    return [version_document(record, record.schema) for record in call.part(found)]


def types(call: Call) -> list[str]:
    return call.registry.types()


def contexts(call: Call) -> list[str]:
    return call.registry.contexts()


def by_id(call: Call) -> dict[str, Any]:
    record = call.registry.by_id(call.schema_id, call.query.get("subject"))
    found = document(record, call.formatted(record))
    if call.flag("fetchMaxId"):
        found["maxId"] = call.registry.highest_id(context_of(record.subject))
    return found


def text(call: Call) -> PlainTextResponse:
    record = call.registry.by_id(call.schema_id, call.query.get("subject"))
    return PlainTextResponse(call.formatted(record))


def subjects(call: Call) -> list[str]:
    found = call.registry.holders(call.schema_id, call.query.get("subject"), deleted=call.flag("deleted"))
    return call.part(list(dict.fromkeys(record.subject for record in found)))


def versions(call: Call) -> list[dict[str, Any]]:
    found = call.registry.holders(call.schema_id, call.query.get("subject"), deleted=call.flag("deleted"))
    return call.part([{"subject": record.subject, "version": record.version} for record in found])
