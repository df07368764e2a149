"""Credentials and settings of AWS profiles, read by botocore as AWS's own tools read them.

obstore reads the environment and asks the metadata services of containers and instances. It does not read
``~/.aws/config`` and ``~/.aws/credentials``: profiles, SSO, ``credential_process``, roles to assume. botocore does, and
gives obstore what it finds.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from urllib.parse import urlsplit

from segmentlog.errors import InvalidConfig

_TTL: Final = timedelta(minutes=10)
"""botocore renews what expires at least so long before it does (``RefreshableCredentials``)."""
_OF_METADATA: Final = ("iam-role", "container-role")
"""botocore's providers that ask an address: obstore asks those itself, and no profile that was named wants them."""
_GIVEN: Final = ("access_key_id", "credential_provider", "skip_signature")
_REGIONS: Final = ("AWS_REGION", "AWS_DEFAULT_REGION")
_ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


class ProfileCredentials:
    """A credential provider of obstore's: the keys of a profile, renewed before they expire. Thread-safe."""

    def __init__(self, profile: str, credentials: Any) -> None:
        self._profile = profile
        self._credentials = credentials
        self.failure = ""
        """Why the last attempt to get keys failed; empty when it succeeded."""
        self.secrets: tuple[str, ...] = ()
        """The keys in use, which no message may show."""

    def __call__(self) -> dict[str, Any]:
        """Return the keys as obstore wants them. Raises whatever botocore raises."""
        try:
            keys = self._credentials.get_frozen_credentials()
        except Exception as error:
            self.failure = f"the AWS profile {self._profile!r} gives no credentials: {error}"
            raise
        self.failure = ""
        self.secrets = tuple(secret for secret in (keys.secret_key, keys.token) if secret)
        return {
            "access_key_id": keys.access_key,
            "secret_access_key": keys.secret_key,
            "token": keys.token,
            "expires_at": datetime.now(UTC) + _TTL,
        }


def profile_options(url: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """What obstore has to be told of the profile in use; nothing where there is none, or the caller says all itself.

    The variable AWS_PROFILE names the profile; without it the profile ``default`` is used, where the files have one. As
    with AWS's tools, credentials in AWS_ACCESS_KEY_ID are used before any profile. Raises `InvalidConfig` when
    a profile is named that there is not, that has no credentials, or that cannot be read without botocore.
    """
    if not _is_of_aws(url) or any(name in options or f"aws_{name}" in options for name in _GIVEN):
        return {}
    named = os.environ.get("AWS_DEFAULT_PROFILE") or os.environ.get("AWS_PROFILE") or ""
    wants_keys = not os.environ.get("AWS_ACCESS_KEY_ID") and not _is_true(os.environ.get("AWS_SKIP_SIGNATURE"))
    if not named and (not any(map(os.path.exists, files())) or os.environ.get("AWS_WEB_IDENTITY_TOKEN_FILE")):
        return {}
    try:
        import botocore.session
        from botocore.exceptions import BotoCoreError, ProfileNotFound
    except ImportError:
        if not named or not wants_keys:
            return {}
        wanted = (
            "a profile that botocore reads: pip install '.[aws]' in a clone of segmentlog. Without botocore,"
            " set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY:"
            " 'aws configure export-credentials --format env' prints them"
        )
        raise InvalidConfig("AWS_PROFILE", named, wanted) from None
    session = botocore.session.Session()
    try:
        found = _settings(session, options)
        if wants_keys:
            resolver = session.get_component("credential_provider")
            for name in _OF_METADATA:
                resolver.remove(name)
            credentials = session.get_credentials()
            if credentials is not None:
                found["credential_provider"] = ProfileCredentials(named or "default", credentials)
    except ProfileNotFound:
        raise InvalidConfig("AWS_PROFILE", named, f"a profile in {' or '.join(files())}") from None
    except BotoCoreError as error:
        raise InvalidConfig("AWS_PROFILE", named or "default", f"a profile that gives credentials ({error})") from None
    if named and wants_keys and "credential_provider" not in found:
        wanted = f"a profile with credentials; {' and '.join(files())} have none for it"
        raise InvalidConfig("AWS_PROFILE", named, wanted)
    return found


def files() -> tuple[str, str]:
    """The two files of profiles: of credentials, and of settings."""
    places = (("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"), ("AWS_CONFIG_FILE", "~/.aws/config"))
    credentials, config = (os.path.expanduser(os.environ.get(name) or path) for name, path in places)
    return credentials, config


def _settings(session: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Region and endpoint of the profile, where neither the environment nor the caller gives one."""
    from botocore.configprovider import ConfiguredEndpointProvider

    found = {}
    scoped = session.get_scoped_config()
    if "region" not in options and not any(map(os.environ.get, _REGIONS)) and scoped.get("region"):
        found["region"] = scoped["region"]
    endpoint = ConfiguredEndpointProvider(session.full_config, scoped, "s3").provide()
    if endpoint and "endpoint" not in options and not any(map(os.environ.get, _ENDPOINTS)):
        found["endpoint"] = endpoint
    return found


def _is_of_aws(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme.lower() in ("s3", "s3a") or (parts.hostname or "").endswith(".amazonaws.com")


def _is_true(text: str | None) -> bool:
    return (text or "").lower() in ("1", "true", "yes", "on", "y", "t")
