"""What is asked about configurations and modes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from segmentlog.http.registry.registry_request import RegistryRequest


def config(request: RegistryRequest) -> dict[str, Any]:
    return dict(request.registry.config(request.subject, default_to_global=request.flag("defaultToGlobal")))


def set_config(request: RegistryRequest) -> dict[str, Any]:
    """What is sent calls it ``compatibility``, and so does the answer; everywhere else it is ``compatibilityLevel``."""
    asked = request.decode(dict[str, Any])
    wanted = {("compatibilityLevel" if name == "compatibility" else name): value for name, value in asked.items()}
    request.registry.set_config(request.subject, wanted)
    return {("compatibility" if name == "compatibilityLevel" else name): value for name, value in wanted.items()}


def delete_config(request: RegistryRequest) -> dict[str, Any]:
    return dict(request.registry.delete_config(request.subject))


def mode(request: RegistryRequest) -> dict[str, str]:
    return {"mode": request.registry.mode(request.subject, default_to_global=request.flag("defaultToGlobal"))}


def set_mode(request: RegistryRequest) -> dict[str, str]:
    wanted = request.decode(dict[str, Any]).get("mode")
    return {"mode": request.registry.set_mode(request.subject, wanted, force=request.flag("force"))}


def delete_mode(request: RegistryRequest) -> dict[str, str]:
    return {"mode": request.registry.delete_mode(request.subject)}
