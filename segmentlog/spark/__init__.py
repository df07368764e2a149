"""Spark over the log: a PySpark data source, and pipelines on it. Needs ``segmentlog[spark]``."""
