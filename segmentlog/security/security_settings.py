"""Paths of the files with users and access rules: given ones, or those in the store."""

from __future__ import annotations

import os

import msgspec

from segmentlog.format.file_names import ACLS_FILE, USERS_FILE


class Security(msgspec.Struct, frozen=True, kw_only=True):
    """Paths of the files with users and access rules. None: no authentication; no restrictions."""

    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    users: str | None = None
    acls: str | None = None
    insecure: bool = False

    def with_store_files(self, store_path: str) -> Security:
        """Return the settings with the users and rules files of the store, for those that are not given.

        A dangling link counts as a file. Reading it fails then; otherwise every client would have access.
        """
        users, acls = f"{store_path}/{USERS_FILE}", f"{store_path}/{ACLS_FILE}"
        return msgspec.structs.replace(
            self,
            users=self.users or (users if os.path.lexists(users) else None),
            acls=self.acls or (acls if os.path.lexists(acls) else None),
        )
