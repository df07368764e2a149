"""A topic's configuration in Kafka's words: told, set, reset, several keys at once."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import TYPE_CHECKING

from segmentlog.config import TopicConfig
from segmentlog.errors import InvalidConfig
from segmentlog.http.error_responses import HttpProblem
from segmentlog.http.rest.responses import Reply, json_reply, nothing
from segmentlog.http.rest.v3 import v3_models
from segmentlog.http.rest.v3.v3_links import Links
from segmentlog.http.rest.v3.v3_topics import visible_topic
from segmentlog.policy.kafka_configs import Entry, describe, known_keys, to_engine, without_effect
from segmentlog.security.principals import Operation
from segmentlog.security.viewer import Thing

if TYPE_CHECKING:
    from collections.abc import Iterable

    from segmentlog.http.rest.rest_request import Call

logger = logging.getLogger("segmentlog.http")

_DEFAULT, _TOPIC = "DEFAULT_CONFIG", "DYNAMIC_TOPIC_CONFIG"


def _data(links: Links, topic: str, entry: Entry, default: Entry) -> v3_models.TopicConfig:
    synonyms = [v3_models.Synonym(entry.name, default.value, _DEFAULT)]
    if not entry.is_default:
        synonyms.insert(0, v3_models.Synonym(entry.name, entry.value, _TOPIC))
    return v3_models.TopicConfig(
        metadata=links.metadata("topics", topic, "configs", entry.name, crn=f"/topic={topic}/config={entry.name}"),
        cluster_id=links.cluster_id,
        topic_name=topic,
        name=entry.name,
        value=entry.value,
        is_default=entry.is_default,
        source=_DEFAULT if entry.is_default else _TOPIC,
        synonyms=synonyms,
    )


def _all(links: Links, topic: str, config: TopicConfig) -> list[v3_models.TopicConfig]:
    defaults = {entry.name: entry for entry in describe(TopicConfig())}
    return [_data(links, topic, entry, defaults[entry.name]) for entry in describe(config)]


async def list_configs(call: Call) -> Reply:
    """Every key of a topic."""
    links = Links(call)

    def look() -> v3_models.TopicConfigList:
        topic = visible_topic(call, Operation.DESCRIBE_CONFIGS)
        metadata = links.list_metadata("topics", topic.name, "configs")
        return v3_models.TopicConfigList(metadata=metadata, data=_all(links, topic.name, topic.config))

    return json_reply(await call.work(look))


async def list_all_configs(call: Call) -> Reply:
    """Every key of every topic."""
    links = Links(call)

    def look() -> v3_models.TopicConfigList:
        found = []
        for name in call.store.topics():
            if call.may_see(Thing.TOPIC_CONFIG, name):
                found += _all(links, name, call.store.topic(name).config)
        return v3_models.TopicConfigList(metadata=links.list_metadata("topics", "-", "configs"), data=found)

    return json_reply(await call.work(look))


async def get_config(call: Call) -> Reply:
    """One key."""
    links = Links(call)

    def look() -> v3_models.TopicConfig:
        topic = visible_topic(call, Operation.DESCRIBE_CONFIGS)
        for data in _all(links, topic.name, topic.config):
            if data.name == call.path["name"]:
                return data
        raise _unknown(call.path["name"], topic.name)

    return json_reply(await call.work(look))


def _unknown(key: str, topic: str) -> HttpProblem:
    return HttpProblem(HTTPStatus.NOT_FOUND, f"Config {key} cannot be found for topic {topic}.")


async def set_config(call: Call) -> Reply:
    """Set one key."""
    asked: v3_models.ConfigValue = await call.document()
    return await _alter(call, [v3_models.ConfigChange(call.path["name"], asked.value, "SET")])


async def reset_config(call: Call) -> Reply:
    """One key back to its default."""
    if call.path["name"] not in known_keys():
        raise _unknown(call.path["name"], call.path["topic_name"])
    return await _alter(call, [v3_models.ConfigChange(call.path["name"], None, "DELETE")])


async def alter_configs(call: Call) -> Reply:
    """Several keys at once: all of them, or none."""
    asked: v3_models.ConfigChanges = await call.document()
    return await _alter(call, asked.data, validate_only=asked.validate_only)


async def _alter(call: Call, changes: Iterable[v3_models.ConfigChange], *, validate_only: bool = False) -> Reply:
    Links(call)
    call.check_administration()

    def alter() -> None:
        topic = visible_topic(call, Operation.ALTER_CONFIGS)
        settings: dict[str, str | None] = {}
        resets: list[str] = []
        for change in changes:
            if change.operation == "DELETE":
                resets.append(change.name)
            elif change.value is None:
                raise InvalidConfig(change.name, None, "a value, or the operation DELETE")
            else:
                settings[change.name] = change.value
        wanted = to_engine(settings, topic.config, resets)
        altered = topic.config.replace(wanted)
        if validate_only:
            return
        if wanted:
            call.store.alter_topic(topic.name, wanted)
        if ineffective := without_effect(settings, altered, is_shipped=call.store.is_shipped):
            logger.warning("topic %s was given settings that have no effect: %s", topic.name, ineffective)

    await call.work(alter)
    return nothing()
