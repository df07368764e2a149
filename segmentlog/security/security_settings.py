"""Which files say who may come in and what they may do: those given, or those of the store."""

from __future__ import annotations

import os

import msgspec

from segmentlog.format.file_names import ACLS_FILE, USERS_FILE


class Security(msgspec.Struct, frozen=True, kw_only=True):
    """Files that say who may come in and what they may do; None: whoever reaches us, and everything."""

    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    users: str | None = None
    acls: str | None = None
    insecure: bool = False

    def with_those_of(self, store_path: str) -> Security:
        """The same with the users and the rules that lie in the store, where no others are named.

        A link to what is not there is one, too: whoever reads it says so, where otherwise everybody would come in.
        """
        users, acls = f"{store_path}/{USERS_FILE}", f"{store_path}/{ACLS_FILE}"
        return msgspec.structs.replace(
            self,
            users=self.users or (users if os.path.lexists(users) else None),
            acls=self.acls or (acls if os.path.lexists(acls) else None),
        )
