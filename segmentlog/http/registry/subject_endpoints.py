"""What is asked about subjects and their versions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.responses import PlainTextResponse

from segmentlog.http.registry.registry_request import version_document
from segmentlog.schemas.registry_errors import InvalidSchema

if TYPE_CHECKING:
    from segmentlog.http.registry.registry_request import RegistryRequest


def names(request: RegistryRequest) -> list[str]:
    return request.part(
        request.registry.subjects(
            request.query.get("subjectPrefix", ":*:"),
            deleted=request.flag("deleted"),
            only_deleted=request.flag("deletedOnly"),
        )
    )


def versions(request: RegistryRequest) -> list[int]:
    return request.part(
        request.registry.versions(
            request.named_subject, deleted=request.flag("deleted"), only_deleted=request.flag("deletedOnly")
        )
    )


def version(request: RegistryRequest) -> dict[str, Any]:
    record = request.registry.version(request.named_subject, request.version, deleted=request.flag("deleted"))
    return version_document(record, request.formatted(record))


def text(request: RegistryRequest) -> PlainTextResponse:
    record = request.registry.version(request.named_subject, request.version, deleted=request.flag("deleted"))
    return PlainTextResponse(request.formatted(record))


def referenced_by(request: RegistryRequest) -> list[int]:
    return request.part(
        request.registry.referenced_by(request.named_subject, request.version, deleted=request.flag("deleted"))
    )


def register(request: RegistryRequest) -> dict[str, Any]:
    """Without its text: clients keep the one that they have sent, in the form that they read."""
    record = request.registry.register(request.named_subject, request.draft(), normalize=request.flag("normalize"))
    found = {"id": record.id, "version": record.version}
    return found | ({"schema": request.formatted(record)} if "format" in request.query else {})


def lookup(request: RegistryRequest) -> dict[str, Any]:
    record = request.registry.lookup(
        request.named_subject,
        request.draft(),
        normalize=request.flag("normalize"),
        # Newer clients say "deleted", older ones the other.
        deleted=request.flag("deleted") or request.flag("lookupDeletedSchema"),
    )
    return version_document(record, request.formatted(record))


def check(request: RegistryRequest) -> dict[str, Any]:
    """Whether a schema may follow, or stand beside one version; why not, where that is asked for."""
    try:
        problems = request.registry.check(request.named_subject, request.draft(), request.path.get("version"))
    except InvalidSchema as error:
        if not request.flag("verbose"):
            raise
        problems = [str(error)]
    return {"is_compatible": not problems} | ({"messages": problems} if request.flag("verbose") else {})


def delete(request: RegistryRequest) -> list[int]:
    return request.registry.delete_subject(request.named_subject, permanent=request.flag("permanent"))


def delete_version(request: RegistryRequest) -> int:
    return request.registry.delete_version(request.named_subject, request.version, permanent=request.flag("permanent"))
