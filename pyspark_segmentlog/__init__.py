"""Spark finds the data source by this package's name, without being told of it."""

from segmentlog.spark.data_source import DefaultSource as DefaultSource
