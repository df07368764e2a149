"""The coordination engine over etcd: a document is a key, and a swap is a transaction that compares ``mod_revision``.

The key of a document is the path of the URL and the name of the document, such as ``/orders/cluster.json``. Reads are
linearizable: etcd asks a quorum of its members. The revision of the last change of a key is its tag; "0" means that
the key does not exist.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from typing import Final

import msgspec

from segmentlog.coordination.coordination_engine import ConditionFailed
from segmentlog.coordination.engine_url import EngineAddress
from segmentlog.coordination.etcd_gateway import Decoder, EtcdGateway
from segmentlog.errors import CoordinatorRefused

_MISSING: Final = "0"


class _KeyValue(msgspec.Struct):
    mod_revision: str = ""
    value: str = ""


class _RangeAnswer(msgspec.Struct):
    kvs: list[_KeyValue] = []


class _AnswerHeader(msgspec.Struct):
    revision: str = ""


class _TransactionAnswer(msgspec.Struct):
    header: _AnswerHeader
    succeeded: bool = False


class _DeleteAnswer(msgspec.Struct):
    deleted: str = "0"


_range_decoder: Final = Decoder(_RangeAnswer)
_transaction_decoder: Final = Decoder(_TransactionAnswer)
_delete_decoder: Final = Decoder(_DeleteAnswer)


class EtcdEngine:
    """A `CoordinationEngine` over etcd 3.4 or newer. Thread-safe. A forked child can continue to use it."""

    def __init__(self, address: EngineAddress) -> None:
        self.url = address.url
        self._path = address.path
        self._gateway = EtcdGateway(address)

    def get(self, key: str) -> tuple[bytes, str] | None:
        """Do as `CoordinationEngine.get`."""
        answer = self._gateway.call("kv/range", {"key": self._encode_key(key)}, _range_decoder)
        if not answer.kvs:
            return None
        found = answer.kvs[0]
        try:
            return base64.b64decode(found.value, validate=True), str(int(found.mod_revision))
        except (binascii.Error, ValueError):
            raise CoordinatorRefused(self.url, f"{key}: the answer does not have the form of etcd's answers") from None

    def compare_and_swap(self, key: str, data: bytes, tag: str | None) -> str:
        """Do as `CoordinationEngine.compare_and_swap`.

        A request without an answer is repeated at the next server. It takes effect once at most, because its first
        effect makes its condition false.
        """
        encoded = self._encode_key(key)
        compare = {"key": encoded, "target": "MOD", "result": "EQUAL", "mod_revision": tag or _MISSING}
        put = {"key": encoded, "value": base64.b64encode(data).decode()}
        body = {"compare": [compare], "success": [{"request_put": put}]}
        answer = self._gateway.call("kv/txn", body, _transaction_decoder)
        if not answer.succeeded:
            raise ConditionFailed
        return answer.header.revision

    def wait_for_change(self, key: str, tag: str | None, seconds: float) -> bool:
        """Do as `CoordinationEngine.wait_for_change`. It cannot wait for the first document."""
        if tag is None:
            return False
        request = {"key": self._encode_key(key), "start_revision": str(int(tag) + 1)}
        return self._gateway.watch({"create_request": request}, seconds)

    def delete(self, keys: Iterable[str]) -> None:
        """Do as `CoordinationEngine.delete`."""
        for key in keys:
            self._gateway.call("kv/deleterange", {"key": self._encode_key(key)}, _delete_decoder)

    def close(self) -> None:
        """Do as `CoordinationEngine.close`."""
        self._gateway.close()

    def _encode_key(self, key: str) -> str:
        return base64.b64encode(f"{self._path}/{key}".encode()).decode()
