"""The check for leftovers of a test, in a process that has a Spark session."""

from __future__ import annotations

import gc
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor

from leftovers import Snapshot
from pyspark.sql import SparkSession


def _is_soon_connected_to_nobody(connection: socket.socket) -> bool:
    """Return whether Java closes its end of the connection soon."""
    for _ in range(1000):
        try:
            connection.getpeername()
        except OSError:
            return True
        time.sleep(0.01)
    return False


def test_connections_to_java_are_no_leak_and_others_are(spark: SparkSession) -> None:
    """The connections that pyspark opens for each thread are no leak, but other sockets are."""
    before = Snapshot.take()
    # Each thread has its own connection to the JVM and a Java thread with its own session; this thread keeps both.
    with ThreadPoolExecutor(1) as another, socket.create_server(("127.0.0.1", 0)) as server:
        connection = another.submit(spark.sparkContext._gateway._gateway_client._create_new_connection).result()
        found = Snapshot.take()
        assert len(found.descriptors - before.descriptors) == 2
        assert {fd for fd, _ in found.since(before).descriptors} == {server.fileno()}
        connection.socket.shutdown(socket.SHUT_RDWR)  # as if Java had
        assert _is_soon_connected_to_nobody(connection.socket)
        spark.sparkContext._gateway._gateway_client.deque.append(connection)
        assert {fd for fd, _ in Snapshot.take().since(before).descriptors} == {server.fileno()}
        spark.sparkContext._gateway._gateway_client.deque.remove(connection)
        connection.socket.close()


def test_a_forked_child_tells_java_nothing(spark: SparkSession) -> None:
    """The collector of a child leaves the parent's Java objects alone."""
    words = [spark.sparkContext._jvm.java.lang.Object()]
    words.append(words)  # a cycle, so that only the collector finds it
    del words
    child = os.fork()
    if not child:
        code = 1
        try:
            gc.collect()
            code = 0 if gc.get_freeze_count() > 0 else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert spark.sparkContext._jvm.java.lang.String("y") == "y"
