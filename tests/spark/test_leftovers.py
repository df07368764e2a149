"""What the check of every test's leftovers makes of a process that has a Spark session."""

from __future__ import annotations

import socket

from leftovers import Snapshot
from pyspark.sql import SparkSession


def test_connections_to_java_are_no_leak_and_others_are(spark: SparkSession) -> None:
    """Java's objects that the collector finds are told to the JVM, by whatever thread it runs in."""
    before = Snapshot.take()
    connection = spark.sparkContext._gateway._gateway_client._create_new_connection()
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = Snapshot.take()
        assert len(found.descriptors - before.descriptors) == 2
        assert {fd for fd, _ in found.since(before).descriptors} == {server.fileno()}
    connection.close()
