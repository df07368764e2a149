"""Authentication and authorization: TLS, SASL, users, and access control lists (ACLs)."""
