"""What the check of every test's leftovers makes of a process that has a Spark session."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

from leftovers import Snapshot
from pyspark.sql import SparkSession


def test_connections_to_java_are_no_leak_and_others_are(spark: SparkSession) -> None:
    """Java's objects that the collector finds are told to the JVM, by whatever thread it runs in."""
    before = Snapshot.take()
    # A thread has a connection of its own, and with it one in Java, which has the session: this one's stays what it is.
    with ThreadPoolExecutor(1) as another, socket.create_server(("127.0.0.1", 0)) as server:
        connection = another.submit(spark.sparkContext._gateway._gateway_client._create_new_connection).result()
        found = Snapshot.take()
        assert len(found.descriptors - before.descriptors) == 2
        assert {fd for fd, _ in found.since(before).descriptors} == {server.fileno()}
        another.submit(connection.close).result()
