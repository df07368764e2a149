"""Collect the error codes of a response from all fields that its schema has for them."""

from __future__ import annotations

from typing import Any, Final, NamedTuple, get_args, get_origin

import msgspec

_ERROR_CODES: Final = ("error_code", "partition_error_code")
"""Names of the field; the second is used by AddPartitionsToTxn only."""


class _Plan(NamedTuple):
    """The places of error codes in a struct: its own field, and fields that are lists of structs."""

    code: str
    """Name of the struct's error code field; empty if it has none."""
    lists: tuple[tuple[str, _Plan], ...]


_PLANS: Final[dict[type, _Plan | None]] = {}
"""Where the error codes of a class of responses are, found at first use; None without any."""


def collect_error_codes(response: msgspec.Struct) -> list[int]:
    """Return all error codes except 0; a code that occurs twice is returned twice."""
    cls = response.__class__
    try:
        plan = _PLANS[cls]
    except KeyError:
        plan = _PLANS[cls] = _plan_of(cls)
    found: list[int] = []
    if plan is not None:
        _collect(response, plan, found)
    return found


def _collect(message: Any, plan: _Plan, found: list[int]) -> None:
    if plan.code and (code := getattr(message, plan.code)):
        found.append(code)
    for name, inner in plan.lists:
        if inner.lists:
            for item in getattr(message, name) or ():
                _collect(item, inner, found)
        else:  # the usual case, a list of partitions: no call for each
            field = inner.code
            for item in getattr(message, name) or ():
                if code := getattr(item, field):
                    found.append(code)


def _plan_of(cls: type[msgspec.Struct]) -> _Plan | None:
    code = ""
    lists = []
    for field in msgspec.structs.fields(cls):
        if field.name in _ERROR_CODES:
            code = field.name
        element = _element_of(field.type)
        inner = None if element is None else _plan_of(element)
        if inner is not None:
            lists.append((field.name, inner))
    return _Plan(code, tuple(lists)) if code or lists else None


def _element_of(kind: Any) -> type[msgspec.Struct] | None:
    """Return the struct that a field is a list of, also an optional list; None for other fields."""
    for item in (kind, *get_args(kind)):
        if get_origin(item) is list:
            (element,) = get_args(item)
            if isinstance(element, type) and issubclass(element, msgspec.Struct):
                return element
    return None
