"""Open the coordination engine that a URL names: an object store, etcd or ZooKeeper."""

from __future__ import annotations

import os

from segmentlog.coordination.bucket_engine import BucketEngine
from segmentlog.coordination.cluster_coordinator import Coordinator
from segmentlog.coordination.coordination_engine import CoordinationEngine
from segmentlog.coordination.engine_url import PORTS, parse_address
from segmentlog.errors import InvalidConfig
from segmentlog.objects.bucket.url import check_scheme, open_bucket


def open_coordinator(url: str) -> Coordinator:
    """Open the coordinator of a cluster. Raise as `open_engine`."""
    return Coordinator(open_engine(url))


def open_engine(url: str) -> CoordinationEngine:
    """Open the coordination engine at a URL. Send no request yet.

    Raise `InvalidConfig` for a URL of another form, for an unreadable file, and if the engine's extra is missing.
    """
    scheme = url.partition("://")[0].lower()
    if scheme not in PORTS:
        return BucketEngine(open_bucket(_check_bucket(url)))
    address = parse_address(url, os.environ)
    if scheme.startswith("etcd"):
        from segmentlog.coordination.etcd_engine import EtcdEngine

        return EtcdEngine(address)
    from segmentlog.coordination.zookeeper_engine import ZooKeeperEngine

    return ZooKeeperEngine(address)


def _check_bucket(url: str) -> str:
    try:
        return check_scheme("url", url)
    except InvalidConfig as error:
        accepted = f"etcd://HOST,HOST,HOST/path, zk://HOST,HOST,HOST/path, {error.accepted}"
        raise InvalidConfig(error.key, error.value, accepted) from None
