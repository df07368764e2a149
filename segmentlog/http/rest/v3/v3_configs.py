"""REST v3 endpoints of topic configurations, in Kafka's terms."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import TYPE_CHECKING

from segmentlog.config import TopicConfig
from segmentlog.errors import InvalidConfig
from segmentlog.http.error_responses import HttpProblem
from segmentlog.http.rest.responses import RestResponse, json_response, no_content
from segmentlog.http.rest.v3 import v3_models
from segmentlog.http.rest.v3.v3_links import Links
from segmentlog.http.rest.v3.v3_topics import visible_topic
from segmentlog.policy.kafka_configs import ConfigEntry, describe, known_keys, to_engine, without_effect
from segmentlog.security.principals import Operation
from segmentlog.security.viewer import Thing

if TYPE_CHECKING:
    from collections.abc import Iterable

    from segmentlog.http.rest.rest_request import RestRequest

logger = logging.getLogger("segmentlog.http")

_DEFAULT, _TOPIC = "DEFAULT_CONFIG", "DYNAMIC_TOPIC_CONFIG"


def _data(links: Links, topic: str, entry: ConfigEntry, default: ConfigEntry) -> v3_models.TopicConfigData:
    synonyms = [v3_models.Synonym(entry.name, default.value, _DEFAULT)]
    if not entry.is_default:
        synonyms.insert(0, v3_models.Synonym(entry.name, entry.value, _TOPIC))
    return v3_models.TopicConfigData(
        metadata=links.metadata("topics", topic, "configs", entry.name, crn=f"/topic={topic}/config={entry.name}"),
        cluster_id=links.cluster_id,
        topic_name=topic,
        name=entry.name,
        value=entry.value,
        is_default=entry.is_default,
        source=_DEFAULT if entry.is_default else _TOPIC,
        synonyms=synonyms,
    )


def _all(links: Links, topic: str, config: TopicConfig) -> list[v3_models.TopicConfigData]:
    defaults = {entry.name: entry for entry in describe(TopicConfig())}
    return [_data(links, topic, entry, defaults[entry.name]) for entry in describe(config)]


async def list_configs(request: RestRequest) -> RestResponse:
    """Return every key of a topic."""
    links = Links(request)

    def build_response() -> v3_models.TopicConfigList:
        topic = visible_topic(request, Operation.DESCRIBE_CONFIGS)
        metadata = links.list_metadata("topics", topic.name, "configs")
        return v3_models.TopicConfigList(metadata=metadata, data=_all(links, topic.name, topic.config))

    return json_response(await request.work(build_response))


async def list_all_configs(request: RestRequest) -> RestResponse:
    """Return every key of every topic."""
    links = Links(request)

    def build_response() -> v3_models.TopicConfigList:
        found = []
        for name in request.store.topics():
            if request.may_see(Thing.TOPIC_CONFIG, name):
                found += _all(links, name, request.store.topic(name).config)
        return v3_models.TopicConfigList(metadata=links.list_metadata("topics", "-", "configs"), data=found)

    return json_response(await request.work(build_response))


async def get_config(request: RestRequest) -> RestResponse:
    """Return one key."""
    links = Links(request)

    def build_response() -> v3_models.TopicConfigData:
        topic = visible_topic(request, Operation.DESCRIBE_CONFIGS)
        for data in _all(links, topic.name, topic.config):
            if data.name == request.path["name"]:
                return data
        raise _unknown(request.path["name"], topic.name)

    return json_response(await request.work(build_response))


def _unknown(key: str, topic: str) -> HttpProblem:
    return HttpProblem(HTTPStatus.NOT_FOUND, f"Config {key} cannot be found for topic {topic}.")


async def set_config(request: RestRequest) -> RestResponse:
    """Set one key."""
    asked: v3_models.ConfigValue = await request.document()
    return await _alter(request, [v3_models.ConfigChange(request.path["name"], asked.value, "SET")])


async def reset_config(request: RestRequest) -> RestResponse:
    """Reset one key to its default."""
    if request.path["name"] not in known_keys():
        raise _unknown(request.path["name"], request.path["topic_name"])
    return await _alter(request, [v3_models.ConfigChange(request.path["name"], None, "DELETE")])


async def alter_configs(request: RestRequest) -> RestResponse:
    """Change several keys, all or none."""
    asked: v3_models.ConfigChanges = await request.document()
    return await _alter(request, asked.data, validate_only=asked.validate_only)


async def _alter(
    request: RestRequest, changes: Iterable[v3_models.ConfigChange], *, validate_only: bool = False
) -> RestResponse:
    Links(request)
    request.check_administration()

    def alter() -> None:
        topic = visible_topic(request, Operation.ALTER_CONFIGS)
        settings: dict[str, str | None] = {}
        resets: list[str] = []
        for change in changes:
            if change.operation == "DELETE":
                resets.append(change.name)
            elif change.value is None:
                raise InvalidConfig(change.name, None, "a value, or the operation DELETE")
            else:
                settings[change.name] = change.value
        engine_settings = to_engine(settings, topic.config, resets)
        altered = topic.config.replace(engine_settings)
        if validate_only:
            return
        if engine_settings:
            request.store.alter_topic(topic.name, engine_settings)
        if ineffective := without_effect(settings, altered, is_shipped=request.store.is_shipped):
            logger.warning("topic %s was given settings that have no effect: %s", topic.name, ineffective)

    await request.work(alter)
    return no_content()
