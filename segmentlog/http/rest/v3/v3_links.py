"""Where things are: the links between resources, their names, and whether the cluster is this one."""

from __future__ import annotations

import base64
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from segmentlog.http.error_responses import HttpProblem
from segmentlog.http.path_names import segment
from segmentlog.http.rest.v3.v3_models import ListMetadata, Metadata, Related

if TYPE_CHECKING:
    from segmentlog.http.rest.rest_request import Call

BROKER: Final = 1
"""As at the Kafka door: the first of its workers."""


def cluster_id_of(store_id: str) -> str:
    """Kafka's form of an id, and the one that the Kafka door tells: 22 characters for 16 bytes."""
    return base64.urlsafe_b64encode(bytes.fromhex(store_id)).decode().rstrip("=")


class Links:
    """Of the cluster in the path. Raises `HttpProblem` when it is another one."""

    def __init__(self, call: Call) -> None:
        self.cluster_id = cluster_id_of(call.store.store_id)
        asked = call.path.get("cluster_id", self.cluster_id)
        if asked != self.cluster_id:
            raise HttpProblem(HTTPStatus.NOT_FOUND, f"Cluster {asked} cannot be found.")
        self._clusters = f"{call.base_url}/v3/clusters"
        self._root = f"{self._clusters}/{self.cluster_id}"

    def url(self, *path: object) -> str:
        """Of something in the cluster."""
        return "/".join((self._root, *map(segment, path)))

    def related(self, *path: object) -> Related:
        """A link to it."""
        return Related(self.url(*path))

    def metadata(self, *path: object, crn: str = "") -> Metadata:
        """Of one resource."""
        return Metadata(self.url(*path), f"crn:///kafka={self.cluster_id}{crn}")

    def list_metadata(self, *path: object, query: str = "") -> ListMetadata:
        """Of a list, all of which is in one answer."""
        return ListMetadata(self.url(*path) + (f"?{query}" if query else ""))

    def clusters_metadata(self) -> ListMetadata:
        """Of the list of clusters."""
        return ListMetadata(self._clusters)
