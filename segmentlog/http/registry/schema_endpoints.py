"""Registry endpoints about schemas of any subject."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.responses import PlainTextResponse

from segmentlog.http.registry.registry_request import document, version_document
from segmentlog.schemas.subject_names import context_of

if TYPE_CHECKING:
    from segmentlog.http.registry.registry_request import RegistryRequest


def list_schemas(request: RegistryRequest) -> list[dict[str, Any]]:
    found = request.registry.schemas(
        request.query.get("subjectPrefix", ":*:"),
        deleted=request.flag("deleted"),
        latest_only=request.flag("latestOnly"),
    )
    return [version_document(record, record.schema) for record in request.part(found)]


def list_types(request: RegistryRequest) -> list[str]:
    return request.registry.types()


def list_contexts(request: RegistryRequest) -> list[str]:
    return request.registry.contexts()


def get_schema(request: RegistryRequest) -> dict[str, Any]:
    record = request.registry.by_id(request.schema_id, request.query.get("subject"))
    found = document(record, request.formatted(record))
    if request.flag("fetchMaxId"):
        found["maxId"] = request.registry.highest_id(context_of(record.subject))
    return found


def get_schema_text(request: RegistryRequest) -> PlainTextResponse:
    record = request.registry.by_id(request.schema_id, request.query.get("subject"))
    return PlainTextResponse(request.formatted(record))


def list_subjects(request: RegistryRequest) -> list[str]:
    found = request.registry.holders(request.schema_id, request.query.get("subject"), deleted=request.flag("deleted"))
    return request.part(list(dict.fromkeys(record.subject for record in found)))


def list_versions(request: RegistryRequest) -> list[dict[str, Any]]:
    found = request.registry.holders(request.schema_id, request.query.get("subject"), deleted=request.flag("deleted"))
    return request.part([{"subject": record.subject, "version": record.version} for record in found])
