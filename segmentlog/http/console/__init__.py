"""The console: pages for people who would rather look at a log than type at it.

`routes` is what belongs below ``/ui``. Pages are made here, on the server, and work without the script. That makes
times local, fills the live tail, and refreshes what one looks at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.routing import Route

from segmentlog.http.console.damage_pages import DamagePages
from segmentlog.http.console.group_pages import GroupPages
from segmentlog.http.console.pages import Console as Console
from segmentlog.http.console.record_pages import Decode as Decode
from segmentlog.http.console.record_pages import RecordPages
from segmentlog.http.console.topic_pages import TopicPages
from segmentlog.http.console.transaction_pages import TransactionPages

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

    from segmentlog.consuming.record_filter import DecodeValue


def routes(console: Console, decode: Decode | None = None, documents: DecodeValue | None = None) -> list[BaseRoute]:
    """The pages, with paths below where they are mounted.

    ``decode`` and ``documents`` know schemas: they make a text of a value, to be shown, and objects, to be searched.
    """
    topics, records = TopicPages(console), RecordPages(console, decode, documents)
    groups, transactions = GroupPages(console), TransactionPages(console)
    of_topic = "/topics/{topic}"
    of_record = of_topic + "/records/{partition}/{offset}"
    return [
        console.route("/", topics.all),
        console.route(of_topic, topics.show),
        console.route(of_topic + "/partitions/{partition}", topics.partition),
        console.route(of_topic + "/config", topics.edit),
        console.form(of_topic + "/config", topics.alter),
        console.route(of_topic + "/delete", topics.ask_delete),
        console.form(of_topic + "/delete", topics.delete),
        console.route(of_topic + "/records", records.all),
        console.route(of_record, records.show),
        console.route(of_record + "/value", records.value),
        console.route(of_topic + "/tail", records.tail),
        Route(of_topic + "/tail/events", records.events, methods=["GET"]),
        console.route("/groups", groups.all),
        console.route("/groups/group", groups.show),
        console.route("/groups/reset", groups.ask_reset),
        console.form("/groups/reset", groups.reset),
        console.route("/transactions", transactions.all),
        console.route("/transactions/abort", transactions.ask_abort),
        console.form("/transactions/abort", transactions.abort),
        console.route("/damage", DamagePages(console).show),
        Route("/static/{name}", console.static, methods=["GET"]),
        Route("/{rest:path}", console.nowhere, methods=["GET"]),
    ]
