"""Turn errors of obstore into short messages without secrets.

obstore's errors contain the server's response and a debug dump of Rust's objects. Both may contain secrets: URLs with
queries, passwords, and parts of the refused request that servers repeat, such as its signature and token.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote, unquote, urlsplit

_TEXT_MAX: Final = 400
_SHORTEST_SECRET: Final = 4
_IN_URLS: Final = re.compile(r"\?[^\s\"'>)]*|(?<!abfs:)(?<!abfss:)//[^/\s@]*@|//[^/\s@:]*:[^/\s@]*@", re.IGNORECASE)
"""Queries and user names of URLs. In abfss://container@account.dfs.core.windows.net/path the name is the container."""
_OF_CONTAINERS: Final = ("abfs", "abfss")
_KEY_IDS: Final = re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}\b")
_SECRET_NAMES: Final = re.compile(r"key|secret|token|password|sas|credential|signature", re.IGNORECASE)
_PREFIXES: Final = ("AWS_", "AZURE_", "GOOGLE_")
_NOT_SECRET: Final = ("_FILE", "_PATH", "_URI", "_URL", "_APPLICATION_CREDENTIALS")
_OBJECT_CODES: Final = ("", "NoSuchKey", "NoSuchObject", "NoSuchVersion", "BlobNotFound", "ResourceNotFound")
_CODE: Final = re.compile(r"<Code>([^<]*)</Code>")
_MESSAGE: Final = re.compile(r"<Message>([^<]*)</Message>")
_STATUS: Final = re.compile(r"status code: (\d{3})")
_CAUSES: Final = (
    ("BadScheme", "http:// must be enabled first: AWS_ALLOW_HTTP=true"),
    ("dns error", "the host name is unknown"),
    ("kind: Timeout", "no answer in time"),
    ("Connection refused", "no server listens at this address"),
    ("IncompleteMessage", "the connection was closed"),
    ("UnexpectedEof", "the connection was closed"),
    ("connection closed before message completed", "the connection was closed"),
    ("Connection reset", "the connection was closed"),
    ("Broken pipe", "the connection was closed"),
)
"""Causes that only the debug dump contains."""
_RETRIABLE_STATUSES: Final = frozenset((408, 409, 425, 429))
_PERMANENT_STATUSES: Final = frozenset((*range(300, 500), 501))


class ErrorFormatter:
    """A formatter for errors of one object store. It removes the secrets that the store was opened with."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self._given = tuple({*_in_url(url), *_in_options(options)})

    def describe(self, error: BaseException, secrets: Iterable[str] = ()) -> str:
        """Return a short text of an error, without these ``secrets`` and without others that can be recognized."""
        head, _, dump = str(error).partition("Debug source:")
        text = " ".join(head.split())
        if code := _CODE.search(text):
            message = _MESSAGE.search(text)
            text = f"{text[: text.index('<')].rstrip()} {code[1]}{f': {message[1]}' if message else ''}"
        else:
            text = text.partition("<")[0].rstrip()
            text += next((f" ({why})" for sign, why in _CAUSES if sign in dump), "")
        return self.redact(text, secrets)[:_TEXT_MAX]

    def redact(self, text: str, secrets: Iterable[str] = ()) -> str:
        """Return the text with every known or recognizable secret replaced by dots."""
        text = _KEY_IDS.sub("...", _IN_URLS.sub(_without, text))
        for secret in {*self._given, *_in_environment(), *secrets}:
            for form in (secret, quote(secret, safe="")):
                text = text.replace(form, "...")
        return text

    def concerns_object(self, error: BaseException) -> bool:
        """Return whether a "not found" or "conflict" is about the object, not about the bucket or the credentials."""
        text = str(error)
        code = _CODE.search(text)
        return "404 Not Found" not in text or (code[1] if code else "") in _OBJECT_CODES


def without_secrets(url: str) -> str:
    """Return the URL without passwords and tokens."""
    return _IN_URLS.sub(_without, url)


_METADATA: Final = re.compile(r"/latest/(api/token|meta-data)|/computeMetadata/|/metadata/identity/")
_SOURCES: Final = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_WEB_IDENTITY_TOKEN_FILE, AWS_CONTAINER_CREDENTIALS_*_URI,"
    " the profile 'default' (with the extra [aws]), and the metadata service of the instance, which"
    " failed last. Set AWS_PROFILE to use another profile",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, GOOGLE_SERVICE_ACCOUNT, GOOGLE_SERVICE_ACCOUNT_KEY, the file of"
    " 'gcloud auth application-default login', and the metadata service, which failed last",
    "az": "AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN, AZURE_CLIENT_ID with AZURE_CLIENT_SECRET or"
    " AZURE_FEDERATED_TOKEN_FILE, and the identity of the machine, which failed last. AZURE_USE_AZURE_CLI=true takes"
    " the credentials of 'az login'",
}


def credential_sources(url: str, error: BaseException) -> str:
    """Return the places that were searched for credentials if the last place failed; otherwise an empty text."""
    if not _METADATA.search(str(error)):
        return ""
    scheme = url.partition(":")[0].lower()
    return _SOURCES["gs" if scheme == "gs" else "az" if scheme.startswith(("az", "ab", "adl")) else "s3"]


def is_retriable(error: BaseException) -> bool:
    """Return whether repeating the request can succeed."""
    text = str(error)
    if isinstance(error, ValueError) or "BadScheme" in text or "StartTooLarge" in text:
        return False
    status = _STATUS.search(text)
    return status is None or int(status[1]) in _RETRIABLE_STATUSES or int(status[1]) not in _PERMANENT_STATUSES


def _without(found: re.Match[str]) -> str:
    return "//" if found.group().startswith("//") else ""


def _in_url(url: str) -> Iterator[str]:
    parts = urlsplit(url)
    user = parts.netloc.rpartition("@")[0]
    if parts.scheme.lower() in _OF_CONTAINERS and ":" not in user:
        user = ""
    for text in (*user.split(":", 1), *re.split("[&=]", parts.query)):
        if len(text) >= _SHORTEST_SECRET:
            yield text
            yield unquote(text)


def _in_options(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _in_options(value)
        elif isinstance(value, str) and len(value) >= _SHORTEST_SECRET and _SECRET_NAMES.search(name):
            yield value


def _in_environment() -> Iterator[str]:
    for name, value in os.environ.items():
        is_secret = name.startswith(_PREFIXES) and _SECRET_NAMES.search(name) and not name.endswith(_NOT_SECRET)
        if is_secret and len(value) >= _SHORTEST_SECRET:
            yield value
