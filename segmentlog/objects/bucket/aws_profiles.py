"""Load credentials and settings of AWS profiles through botocore, for obstore.

obstore reads the environment and queries the metadata services of containers and instances. It does not read
``~/.aws/config`` and ``~/.aws/credentials``. So it cannot use profiles, SSO, ``credential_process`` or roles to assume.
botocore reads these files as AWS's own tools do; this module passes its credentials to obstore.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from urllib.parse import urlsplit

from segmentlog.errors import InvalidConfig

_TTL: Final = timedelta(minutes=10)
"""botocore renews credentials that expire at least this long before they do (``RefreshableCredentials``)."""
_METADATA_PROVIDERS: Final = ("iam-role", "container-role")
"""botocore providers that query a metadata service. obstore queries these itself; no named profile uses them."""
_GIVEN: Final = ("access_key_id", "credential_provider", "skip_signature")
_REGIONS: Final = ("AWS_REGION", "AWS_DEFAULT_REGION")
_ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


class ProfileCredentials:
    """A credential provider for obstore: the keys of an AWS profile, renewed before they expire. Thread-safe."""

    def __init__(self, profile: str, credentials: Any) -> None:
        self._profile = profile
        self._credentials = credentials
        self.failure = ""
        """Why the last attempt to get keys failed; empty if it succeeded."""
        self.secrets: tuple[str, ...] = ()
        """The keys in use, which must not appear in any message."""

    def __call__(self) -> dict[str, Any]:
        """Return the keys in obstore's format. Raise any error of botocore unchanged."""
        try:
            keys = self._credentials.get_frozen_credentials()
        except Exception as error:
            self.failure = f"cannot get credentials for the AWS profile {self._profile!r}: {error}"
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
    """Return obstore's options for the AWS profile in use; an empty dictionary if no profile applies.

    The variable AWS_PROFILE names the profile; without it the profile ``default`` applies if it exists. As with AWS's
    own tools, credentials in AWS_ACCESS_KEY_ID take precedence over any profile. So do credentials in ``options``.
    Raise `InvalidConfig` for a named profile that does not exist, has no credentials, or cannot be read because
    botocore is not installed.
    """
    if not _is_aws_url(url) or any(name in options or f"aws_{name}" in options for name in _GIVEN):
        return {}
    named = os.environ.get("AWS_DEFAULT_PROFILE") or os.environ.get("AWS_PROFILE") or ""
    needs_keys = not os.environ.get("AWS_ACCESS_KEY_ID") and not _is_true(os.environ.get("AWS_SKIP_SIGNATURE"))
    if not named and (not any(map(os.path.exists, profile_files())) or os.environ.get("AWS_WEB_IDENTITY_TOKEN_FILE")):
        return {}
    try:
        import botocore.session
        from botocore.exceptions import BotoCoreError, ProfileNotFound
    except ImportError:
        if not named or not needs_keys:
            return {}
        expected = (
            "a profile that botocore reads: pip install '.[aws]' in a clone of segmentlog. Without botocore,"
            " set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY:"
            " 'aws configure export-credentials --format env' prints them"
        )
        raise InvalidConfig("AWS_PROFILE", named, expected) from None
    session = botocore.session.Session()
    try:
        found = _settings(session, options)
        if needs_keys:
            resolver = session.get_component("credential_provider")
            for name in _METADATA_PROVIDERS:
                resolver.remove(name)
            credentials = session.get_credentials()
            if credentials is not None:
                found["credential_provider"] = ProfileCredentials(named or "default", credentials)
    except ProfileNotFound:
        raise InvalidConfig("AWS_PROFILE", named, f"a profile in {' or '.join(profile_files())}") from None
    except BotoCoreError as error:
        raise InvalidConfig(
            "AWS_PROFILE", named or "default", f"a profile that gives credentials (botocore: {error})"
        ) from None
    if named and needs_keys and "credential_provider" not in found:
        expected = f"a profile with credentials; {' and '.join(profile_files())} contain none for it"
        raise InvalidConfig("AWS_PROFILE", named, expected)
    return found


def profile_files() -> tuple[str, str]:
    """Return the paths of the two profile files: credentials, then settings."""
    places = (("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"), ("AWS_CONFIG_FILE", "~/.aws/config"))
    credentials, config = (os.path.expanduser(os.environ.get(name) or path) for name, path in places)
    return credentials, config


def _settings(session: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the profile's region and endpoint. Omit a setting that the environment or the caller sets."""
    from botocore.configprovider import ConfiguredEndpointProvider

    found = {}
    scoped = session.get_scoped_config()
    if "region" not in options and not any(map(os.environ.get, _REGIONS)) and scoped.get("region"):
        found["region"] = scoped["region"]
    endpoint = ConfiguredEndpointProvider(session.full_config, scoped, "s3").provide()
    if endpoint and "endpoint" not in options and not any(map(os.environ.get, _ENDPOINTS)):
        found["endpoint"] = endpoint
    return found


def _is_aws_url(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme.lower() in ("s3", "s3a") or (parts.hostname or "").endswith(".amazonaws.com")


def _is_true(text: str | None) -> bool:
    return (text or "").lower() in ("1", "true", "yes", "on", "y", "t")
