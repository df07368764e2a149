"""What is asked about configurations and modes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from segmentlog.http.registry.registry_request import Call


def config(call: Call) -> dict[str, Any]:
    return dict(call.registry.config(call.subject, default_to_global=call.flag("defaultToGlobal")))


def set_config(call: Call) -> dict[str, Any]:
    """What is sent calls it ``compatibility``, and so does the answer; everywhere else it is ``compatibilityLevel``."""
    asked = call.decode(dict[str, Any])
    wanted = {("compatibilityLevel" if name == "compatibility" else name): value for name, value in asked.items()}
    call.registry.set_config(call.subject, wanted)
    return {("compatibility" if name == "compatibilityLevel" else name): value for name, value in wanted.items()}


def delete_config(call: Call) -> dict[str, Any]:
    return dict(call.registry.delete_config(call.subject))


def mode(call: Call) -> dict[str, str]:
    return {"mode": call.registry.mode(call.subject, default_to_global=call.flag("defaultToGlobal"))}


def set_mode(call: Call) -> dict[str, str]:
    wanted = call.decode(dict[str, Any]).get("mode")
    return {"mode": call.registry.set_mode(call.subject, wanted, force=call.flag("force"))}


def delete_mode(call: Call) -> dict[str, str]:
    return {"mode": call.registry.delete_mode(call.subject)}
