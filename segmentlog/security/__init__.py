"""Authentication and authorization: users, TLS, access rules."""
