"""Registry endpoints about subjects and their versions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.responses import PlainTextResponse

from segmentlog.http.registry.registry_request import version_document
from segmentlog.schemas.registry_errors import InvalidSchema

if TYPE_CHECKING:
    from segmentlog.http.registry.registry_request import RegistryRequest


def list_subjects(request: RegistryRequest) -> list[str]:
    return request.part(
        request.registry.subjects(
            request.query.get("subjectPrefix", ":*:"),
            deleted=request.flag("deleted"),
            only_deleted=request.flag("deletedOnly"),
        )
    )


def list_versions(request: RegistryRequest) -> list[int]:
    return request.part(
        request.registry.versions(
            request.named_subject, deleted=request.flag("deleted"), only_deleted=request.flag("deletedOnly")
        )
    )


def get_version(request: RegistryRequest) -> dict[str, Any]:
    record = request.registry.version(request.named_subject, request.version, deleted=request.flag("deleted"))
    return version_document(record, request.formatted(record))


def get_schema_text(request: RegistryRequest) -> PlainTextResponse:
    record = request.registry.version(request.named_subject, request.version, deleted=request.flag("deleted"))
    return PlainTextResponse(request.formatted(record))


def list_references(request: RegistryRequest) -> list[int]:
    return request.part(
        request.registry.referenced_by(request.named_subject, request.version, deleted=request.flag("deleted"))
    )


def register_schema(request: RegistryRequest) -> dict[str, Any]:
    """Register a schema. The response omits its text unless a format is requested: the client already has it."""
    record = request.registry.register(request.named_subject, request.draft(), normalize=request.flag("normalize"))
    found = {"id": record.id, "version": record.version}
    return found | ({"schema": request.formatted(record)} if "format" in request.query else {})


def find_schema(request: RegistryRequest) -> dict[str, Any]:
    record = request.registry.lookup(
        request.named_subject,
        request.draft(),
        normalize=request.flag("normalize"),
        # Newer clients send "deleted", older clients send "lookupDeletedSchema".
        deleted=request.flag("deleted") or request.flag("lookupDeletedSchema"),
    )
    return version_document(record, request.formatted(record))


def check_compatibility(request: RegistryRequest) -> dict[str, Any]:
    """Return whether a schema is compatible with a subject or one of its versions, and on request why not."""
    try:
        problems = request.registry.check(request.named_subject, request.draft(), request.path.get("version"))
    except InvalidSchema as error:
        if not request.flag("verbose"):
            raise
        problems = [str(error)]
    return {"is_compatible": not problems} | ({"messages": problems} if request.flag("verbose") else {})


def delete_subject(request: RegistryRequest) -> list[int]:
    return request.registry.delete_subject(request.named_subject, permanent=request.flag("permanent"))


def delete_version(request: RegistryRequest) -> int:
    return request.registry.delete_version(request.named_subject, request.version, permanent=request.flag("permanent"))
