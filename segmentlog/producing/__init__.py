"""Producers: records are gathered into batches and appended."""
