"""Objects that each right shows, and the additional rights that internal topics require."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from segmentlog.security.acls import Authorizer, OpenAuthorizer
from segmentlog.security.principals import Operation, Principal, ResourceType
from segmentlog.security.viewer import Thing, Viewer

ANN = Principal("User", "ann")
OWN = "__consumer_offsets"

MakeViewer = Callable[..., Viewer]


@pytest.fixture
def view(tmp_path: Path) -> MakeViewer:
    """Return a function that makes a viewer with these rules."""

    def make(*rules: str) -> Viewer:
        path = tmp_path / "acls"
        path.write_text("".join(f"{rule}\n" for rule in rules))
        return Viewer(Authorizer(str(path)), ANN, "127.0.0.1")

    return make


@pytest.mark.parametrize(
    ("rule", "thing", "name"),
    [
        ("describe topic:t", Thing.TOPIC, "t"),
        ("read topic:t", Thing.RECORDS, "t"),
        ("describe-configs topic:t", Thing.TOPIC_CONFIG, "t"),
        ("describe group:t", Thing.GROUP, "t"),
        ("describe-configs group:t", Thing.GROUP_CONFIG, "t"),
        ("describe transactional-id:t", Thing.TRANSACTIONAL_ID, "t"),
        ("read topic:_schemas", Thing.SCHEMAS, ""),
        ("describe cluster", Thing.CLUSTER, ""),
    ],
)
def test_each_thing_takes_its_right(view: MakeViewer, rule: str, thing: Thing, name: str) -> None:
    """That right alone shows it, and nothing of another name or kind, except what the right implies."""
    viewer = view(f"allow User:ann {rule}")
    implied = {Thing.TOPIC} if thing in (Thing.RECORDS, Thing.SCHEMAS) else set()
    seen = {one for one in Thing if viewer.may_see(one, name or "_schemas")}
    assert seen - implied == ({thing, Thing.RECORDS} if thing is Thing.SCHEMAS else {thing})
    assert name == "" or not viewer.may_see(thing, "other")


def test_the_stores_own_topics(view: MakeViewer) -> None:
    """Their metadata requires DESCRIBE on the cluster, everything else ALTER, which allows to change rules."""
    topics = "allow User:ann all topic:*"
    viewer = view(topics)
    assert not any(viewer.may_see(thing, OWN) for thing in (Thing.TOPIC, Thing.TOPIC_CONFIG, Thing.RECORDS))
    viewer = view(topics, "allow User:ann describe cluster")
    assert viewer.may_see(Thing.TOPIC, OWN)
    assert viewer.may_see(Thing.TOPIC_CONFIG, OWN)
    assert not viewer.may_see(Thing.RECORDS, OWN)
    assert not viewer.allows(Operation.DELETE, ResourceType.TOPIC, OWN)
    viewer = view(topics, "allow User:ann alter cluster")
    assert viewer.may_see(Thing.RECORDS, OWN)
    assert not view("allow User:ann alter cluster").may_see(Thing.RECORDS, OWN)
    assert Viewer(OpenAuthorizer(), ANN, "").may_see(Thing.RECORDS, OWN)
