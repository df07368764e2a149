"""Transactions: named producers with their epochs and fences, the transaction log, and transaction markers."""
