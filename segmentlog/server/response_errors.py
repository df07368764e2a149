"""Which error codes an answer tells, wherever its schema has them."""

from __future__ import annotations

from typing import Any, Final, NamedTuple, get_args, get_origin

import msgspec

_ERROR_CODES: Final = ("error_code", "partition_error_code")
"""What the field is called; the latter by AddPartitionsToTxn alone."""


class _Plan(NamedTuple):
    """Where a struct has error codes: in itself, and in the structs of these lists."""

    code: str
    """The field's name; empty where there is none."""
    lists: tuple[tuple[str, _Plan], ...]


_PLANS: Final[dict[type, _Plan | None]] = {}
"""By class of response, made when the first one of it comes. None: it tells of no errors."""


def errors_in(response: msgspec.Struct) -> list[int]:
    """All codes but 0, each as often as it is told."""
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
            for one in getattr(message, name) or ():
                _collect(one, inner, found)
        else:  # the usual case, partitions: no call for each
            field = inner.code
            for one in getattr(message, name) or ():
                if code := getattr(one, field):
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
    """The struct that a field is a list of; it may also be missing altogether."""
    for one in (kind, *get_args(kind)):
        if get_origin(one) is list:
            (element,) = get_args(one)
            if isinstance(element, type) and issubclass(element, msgspec.Struct):
                return element
    return None
