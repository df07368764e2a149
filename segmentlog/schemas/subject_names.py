"""Names of subjects and of the contexts that contain them.

    clicks-value           in the default context, named "."
    :.staging:clicks-value in the context ".staging", which has its own ids

A reference without a context means the context of the schema that contains the reference.
"""

from __future__ import annotations

from typing import Final

from segmentlog.schemas.registry_errors import InvalidSubject

DEFAULT_CONTEXT: Final = "."
GLOBAL_SUBJECTS: Final = ("__GLOBAL", "__EMPTY")
"""Names that Confluent's registry reserves."""


def context_of(subject: str) -> str:
    """Return the context of a subject."""
    if subject.startswith(":.") and (end := subject.find(":", 2)) > 0:
        return subject[1:end]
    return DEFAULT_CONTEXT


def bare_name(subject: str) -> str:
    """Return the subject's name without its context."""
    return subject if context_of(subject) == DEFAULT_CONTEXT else subject[subject.index(":", 2) + 1 :]


def check_subject(subject: object) -> str:
    """Return a subject's name as the registry stores it: ``name`` for ``:.:name``. Raises `InvalidSubject`."""
    if not isinstance(subject, str) or not subject.isprintable() or not subject:
        raise InvalidSubject(subject)
    if subject.startswith(":.:"):
        subject = subject[3:]
    if not bare_name(subject) or bare_name(subject) in GLOBAL_SUBJECTS:
        raise InvalidSubject(subject)
    try:
        subject.encode()
    except UnicodeEncodeError:
        raise InvalidSubject(subject) from None
    return subject


def is_whole_context(subject: str) -> bool:
    """Return whether a name is ``:.name:``, which configures all subjects of a context."""
    return subject.startswith(":.") and subject.endswith(":") and subject.count(":") == 2


def check_scope(subject: object) -> str:
    """Return a name as `check_subject` does, or the name of a whole context. Raises `InvalidSubject`."""
    return subject if isinstance(subject, str) and is_whole_context(subject) else check_subject(subject)


def context_scope(context: str) -> str | None:
    """Return the name of a whole context; None for the default context, which has the global settings."""
    return None if context == DEFAULT_CONTEXT else f":{context}:"


def resolve_subject(subject: str, parent: str) -> str:
    """Return the full name of a subject that a schema of ``parent`` names: by default in the context of ``parent``."""
    context = context_of(parent)
    if subject.startswith(":.") or context == DEFAULT_CONTEXT:
        return subject[3:] if subject.startswith(":.:") else subject
    return f":{context}:{subject}"
