"""What is asked about subjects and their versions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.responses import PlainTextResponse

from segmentlog.http.registry.registry_request import version_document
from segmentlog.schemas.registry_errors import InvalidSchema

if TYPE_CHECKING:
    from segmentlog.http.registry.registry_request import Call


def names(call: Call) -> list[str]:
    return call.part(
        call.registry.subjects(
            call.query.get("subjectPrefix", ":*:"), deleted=call.flag("deleted"), only_deleted=call.flag("deletedOnly")
        )
    )


def versions(call: Call) -> list[int]:
    return call.part(
        call.registry.versions(call.named_subject, deleted=call.flag("deleted"), only_deleted=call.flag("deletedOnly"))
    )


def version(call: Call) -> dict[str, Any]:
    record = call.registry.version(call.named_subject, call.version, deleted=call.flag("deleted"))
    return version_document(record, call.formatted(record))


def text(call: Call) -> PlainTextResponse:
    record = call.registry.version(call.named_subject, call.version, deleted=call.flag("deleted"))
    return PlainTextResponse(call.formatted(record))


def referenced_by(call: Call) -> list[int]:
    return call.part(call.registry.referenced_by(call.named_subject, call.version, deleted=call.flag("deleted")))


def register(call: Call) -> dict[str, Any]:
    """Without its text: clients keep the one that they have sent, in the form that they read."""
    record = call.registry.register(call.named_subject, call.draft(), normalize=call.flag("normalize"))
    found = {"id": record.id, "version": record.version}
    return found | ({"schema": call.formatted(record)} if "format" in call.query else {})


def lookup(call: Call) -> dict[str, Any]:
    record = call.registry.lookup(
        call.named_subject,
        call.draft(),
        normalize=call.flag("normalize"),
        # Newer clients say "deleted", older ones the other.
        deleted=call.flag("deleted") or call.flag("lookupDeletedSchema"),
    )
    return version_document(record, call.formatted(record))


def check(call: Call) -> dict[str, Any]:
    """Whether a schema may follow, or stand beside one version; why not, where that is asked for."""
    try:
        problems = call.registry.check(call.named_subject, call.draft(), call.path.get("version"))
    except InvalidSchema as error:
        if not call.flag("verbose"):
            raise
        problems = [str(error)]
    return {"is_compatible": not problems} | ({"messages": problems} if call.flag("verbose") else {})


def delete(call: Call) -> list[int]:
    return call.registry.delete_subject(call.named_subject, permanent=call.flag("permanent"))


def delete_version(call: Call) -> int:
    return call.registry.delete_version(call.named_subject, call.version, permanent=call.flag("permanent"))
