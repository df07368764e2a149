"""Subjects, and the contexts that they are in.

    clicks-value           in the default context, which is written "."
    :.staging:clicks-value in the context ".staging", whose ids are its own

A reference, or a question, that names a subject without a context means the one of who asks.
"""

from __future__ import annotations

from typing import Final

from segmentlog.schemas.registry_errors import InvalidSubject

DEFAULT_CONTEXT: Final = "."
GLOBAL_SUBJECTS: Final = ("__GLOBAL", "__EMPTY")
"""Names that stand for something else in others' registries."""


def context_of(subject: str) -> str:
    """The context that a subject is in."""
    if subject.startswith(":.") and (end := subject.find(":", 2)) > 0:
        return subject[1:end]
    return DEFAULT_CONTEXT


def bare_name(subject: str) -> str:
    """The subject without its context."""
    return subject if context_of(subject) == DEFAULT_CONTEXT else subject[subject.index(":", 2) + 1 :]


def check_subject(subject: object) -> str:
    """The name as it is stored: ``:.:name`` is just ``name``. Raises `InvalidSubject`."""
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
    """Whether it is ``:.name:``, which configures all subjects of a context."""
    return subject.startswith(":.") and subject.endswith(":") and subject.count(":") == 2


def check_scope(subject: object) -> str:
    """As `check_subject`, and also what stands for a whole context."""
    return subject if isinstance(subject, str) and is_whole_context(subject) else check_subject(subject)


def context_scope(context: str) -> str | None:
    """What stands for a whole context; None for the default one, which the global settings are for."""
    return None if context == DEFAULT_CONTEXT else f":{context}:"


def seen_from(subject: str, parent: str) -> str:
    """The subject that a schema of ``parent`` means by a name: one of its own context, unless it says which."""
    context = context_of(parent)
    if subject.startswith(":.") or context == DEFAULT_CONTEXT:
        return subject[3:] if subject.startswith(":.:") else subject
    return f":{context}:{subject}"
