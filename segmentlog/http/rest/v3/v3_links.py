"""Links between REST v3 resources, and the check of the cluster id."""

from __future__ import annotations

import base64
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from segmentlog.http.error_responses import HttpProblem
from segmentlog.http.path_names import path_segment
from segmentlog.http.rest.v3.v3_models import ListMetadata, Metadata, Related

if TYPE_CHECKING:
    from segmentlog.http.rest.rest_request import RestRequest

BROKER: Final = 1
"""The broker id of the Kafka server's first worker."""


def cluster_id_of(store_id: str) -> str:
    """Return the cluster id that the Kafka server reports: 22 characters for 16 bytes."""
    return base64.urlsafe_b64encode(bytes.fromhex(store_id)).decode().rstrip("=")


class Links:
    """Builds links below the cluster in the path. Raises `HttpProblem` (404) for another cluster."""

    def __init__(self, request: RestRequest) -> None:
        self.cluster_id = cluster_id_of(request.store.store_id)
        asked = request.path.get("cluster_id", self.cluster_id)
        if asked != self.cluster_id:
            raise HttpProblem(HTTPStatus.NOT_FOUND, f"Cluster {asked} cannot be found.")
        self._clusters = f"{request.base_url}/v3/clusters"
        self._root = f"{self._clusters}/{self.cluster_id}"

    def url(self, *path: object) -> str:
        """Return the URL of a resource in the cluster."""
        return "/".join((self._root, *map(path_segment, path)))

    def related(self, *path: object) -> Related:
        """Return a link to a resource."""
        return Related(self.url(*path))

    def metadata(self, *path: object, crn: str = "") -> Metadata:
        """Return the metadata of one resource."""
        return Metadata(self.url(*path), f"crn:///kafka={self.cluster_id}{crn}")

    def list_metadata(self, *path: object, query: str = "") -> ListMetadata:
        """Return the metadata of a list, which is never paged."""
        return ListMetadata(self.url(*path) + (f"?{query}" if query else ""))

    def clusters_metadata(self) -> ListMetadata:
        """Return the metadata of the list of clusters."""
        return ListMetadata(self._clusters)
