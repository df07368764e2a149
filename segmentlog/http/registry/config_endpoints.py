"""Registry endpoints about compatibility levels and modes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from segmentlog.http.registry.registry_request import RegistryRequest


def get_config(request: RegistryRequest) -> dict[str, Any]:
    return dict(request.registry.config(request.subject, default_to_global=request.flag("defaultToGlobal")))


def set_config(request: RegistryRequest) -> dict[str, Any]:
    """Set the compatibility level.

    Request and response of this endpoint call it ``compatibility``; all other messages call it ``compatibilityLevel``.
    """
    asked = request.json_object()
    settings = {("compatibilityLevel" if name == "compatibility" else name): value for name, value in asked.items()}
    request.registry.set_config(request.subject, settings)
    return {("compatibility" if name == "compatibilityLevel" else name): value for name, value in settings.items()}


def delete_config(request: RegistryRequest) -> dict[str, Any]:
    return dict(request.registry.delete_config(request.subject))


def get_mode(request: RegistryRequest) -> dict[str, str]:
    return {"mode": request.registry.mode(request.subject, default_to_global=request.flag("defaultToGlobal"))}


def set_mode(request: RegistryRequest) -> dict[str, str]:
    mode_name = request.json_object().get("mode")
    return {"mode": request.registry.set_mode(request.subject, mode_name, force=request.flag("force"))}


def delete_mode(request: RegistryRequest) -> dict[str, str]:
    return {"mode": request.registry.delete_mode(request.subject)}
