"""Security settings of a server: files of certificates, users and ACLs, given or found in the store."""

from __future__ import annotations

import os

import msgspec

from segmentlog.format.file_names import ACLS_FILE, USERS_FILE


class Security(msgspec.Struct, frozen=True, kw_only=True):
    """Files for TLS, users and ACLs.

    Without users every client may connect; without ACLs every client may do everything.
    """

    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    users: str | None = None
    acls: str | None = None
    insecure: bool = False

    def completed_from_store(self, store_path: str) -> Security:
        """Return the settings, with the users file and the ACL file of the store where the settings name none.

        A dangling link counts as a file, so that reading it fails. Otherwise every client could connect.
        """
        users, acls = f"{store_path}/{USERS_FILE}", f"{store_path}/{ACLS_FILE}"
        return msgspec.structs.replace(
            self,
            users=self.users or (users if os.path.lexists(users) else None),
            acls=self.acls or (acls if os.path.lexists(acls) else None),
        )
