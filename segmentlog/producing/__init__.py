"""Producers gather records into batches and append them."""
