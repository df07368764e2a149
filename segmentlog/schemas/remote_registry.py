"""Client of a schema registry over HTTP: Confluent's, or the server of another store."""

from __future__ import annotations

import base64
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote, unquote, urlencode, urlsplit, urlunsplit

import msgspec

from segmentlog.errors import InvalidConfig
from segmentlog.schemas.parsed_schemas import Draft
from segmentlog.schemas.registry_errors import RegistryUnavailable, RemoteError, UnknownSchema
from segmentlog.schemas.registry_records import Reference, SchemaRecord, decode_schema
from segmentlog.schemas.schema_kind import Dependency, ParsedSchema
from segmentlog.schemas.schema_parsing import parse
from segmentlog.schemas.subject_names import resolve_subject
from segmentlog.storage import fork_safety

_TYPE: Final = "application/vnd.schemaregistry.v1+json"
_ANSWER_MAX: Final = 64 << 20
_REFERENCES_MAX: Final = 1000


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: the client sends its password only to the host in its URL."""

    def redirect_request(self, *args: Any, **named: Any) -> None:
        return None


class RemoteRegistry:
    """Client of the registry at ``http://[user:password@]host:port``, for serializers. Thread-safe.

    ``ca_file`` is a file of trusted certificates for https. The client caches schemas by id without expiry, because an
    id always means the same schema. Raises `RegistryUnavailable`, and `RemoteError` if the registry refuses a request.
    """

    def __init__(self, url: str, *, ca_file: str | None = None, timeout_s: float = 10.0) -> None:
        parts = urlsplit(url) if isinstance(url, str) else None
        if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidConfig("url", "..." if parts and parts.password else url, "http://HOST:PORT or https://")
        self.url = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path.rstrip("/"), "", ""))
        """The URL without user name and password."""
        self._headers = {"Accept": _TYPE, "Content-Type": _TYPE}
        if parts.username is not None:
            secret = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
            self._headers["Authorization"] = f"Basic {base64.b64encode(secret).decode()}"
        handlers: list[urllib.request.BaseHandler] = [_NoRedirects(), urllib.request.ProxyHandler({})]
        if parts.scheme == "https":
            handlers.append(urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=ca_file)))
        self._opener = urllib.request.build_opener(*handlers)
        self._timeout_s = timeout_s
        self._by_id: dict[tuple[int, str | None], SchemaRecord] = {}
        self._mutex = fork_safety.lock(self, "_mutex")

    def __repr__(self) -> str:
        return f"<RemoteRegistry {self.url}>"

    # ------------------------------------------------------------ methods of `SchemaSource`

    def by_id(self, schema_id: int, subject: str | None = None) -> SchemaRecord:
        """See `SchemaRegistry.by_id`."""
        known = self._by_id.get((schema_id, subject))
        if known is None:
            query = {} if subject is None else {"subject": subject}
            try:
                answer = self._ask("GET", f"/schemas/ids/{schema_id}", query)
            except RemoteError as error:
                if error.args[1] == UnknownSchema.code:
                    raise UnknownSchema(schema_id) from None
                raise
            known = _record({"subject": subject or "", "version": 0, **answer, "id": schema_id})
            with self._mutex:
                self._by_id[schema_id, subject] = known
        return known

    def version(self, subject: str, version: int | str = "latest") -> SchemaRecord:
        """See `SchemaRegistry.version`."""
        return _record(self._ask("GET", f"/subjects/{_quoted(subject)}/versions/{_quoted(str(version))}"))

    def register(self, subject: str, draft: Draft, *, normalize: bool = False) -> SchemaRecord:
        """See `SchemaRegistry.register`."""
        answer = self._ask(
            "POST", f"/subjects/{_quoted(subject)}/versions", {"normalize": str(normalize).lower()}, _body(draft)
        )
        if "version" in answer and "schema" in answer:
            return _record({"subject": subject, **answer})
        return self.lookup(subject, draft, normalize=normalize)  # older registries return only the id

    def lookup(self, subject: str, draft: Draft, *, normalize: bool = False) -> SchemaRecord:
        """See `SchemaRegistry.lookup`."""
        return _record(
            self._ask("POST", f"/subjects/{_quoted(subject)}", {"normalize": str(normalize).lower()}, _body(draft))
        )

    def parsed(self, record: SchemaRecord) -> ParsedSchema:
        """See `SchemaRegistry.parsed`."""
        found: dict[str, Dependency] = {}
        self._gather(record.subject, record.references, found)
        return parse(record.schema_type, record.schema, list(found.values()))

    def parsed_draft(self, subject: str, draft: Draft) -> ParsedSchema:
        """See `SchemaRegistry.parsed_draft`."""
        found: dict[str, Dependency] = {}
        self._gather(subject, draft.references, found)
        return parse(draft.schema_type, draft.schema, list(found.values()))

    def _gather(self, subject: str, references: tuple[Reference, ...], found: dict[str, Dependency]) -> None:
        for reference in references:
            if reference.name in found or len(found) > _REFERENCES_MAX:
                continue
            referenced = resolve_subject(reference.subject, subject)
            record = self.version(referenced, reference.version)
            self._gather(referenced, record.references, found)
            found[reference.name] = Dependency(reference.name, record.schema)

    # ------------------------------------------------------------ HTTP requests

    def _ask(
        self, method: str, path: str, query: Mapping[str, str] | None = None, body: bytes | None = None
    ) -> dict[str, Any]:
        url = self.url + path + (f"?{urlencode(query)}" if query else "")
        request = urllib.request.Request(url, data=body, headers=self._headers, method=method)
        try:
            with self._opener.open(request, timeout=self._timeout_s) as response:
                data = response.read(_ANSWER_MAX)
        except urllib.error.HTTPError as error:
            with error:
                self._refused(error.code, error.read(_ANSWER_MAX))
        except (OSError, ValueError) as error:
            raise RegistryUnavailable(self.url, getattr(error, "reason", None) or str(error)) from None
        try:
            return msgspec.json.decode(data, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RegistryUnavailable(self.url, f"the answer does not come from a schema registry: {error}") from None

    def _refused(self, status: int, data: bytes) -> None:
        try:
            answer = msgspec.json.decode(data, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            answer = {}
        code, message = answer.get("error_code", status), answer.get("message", f"HTTP status {status}")
        raise RemoteError(self.url, code, message)


def _quoted(text: str) -> str:
    return quote(text, safe="")


def _body(draft: Draft) -> bytes:
    fields: dict[str, Any] = {"schema": draft.schema, "schemaType": draft.schema_type}
    if draft.references:
        fields["references"] = draft.references
    if draft.metadata:
        fields["metadata"] = draft.metadata
    if draft.rule_set:
        fields["ruleSet"] = draft.rule_set
    return msgspec.json.encode(fields)


def _record(answer: Mapping[str, Any]) -> SchemaRecord:
    try:
        return decode_schema(msgspec.json.encode({"deleted": False, **answer}))
    except ValueError as error:
        raise RemoteError("the registry's answer", 50001, f"the answer is not a valid schema: {error}") from None
