"""The console: web pages about a store's topics, groups, transactions and damage.

`routes` returns the pages, which are mounted below ``/ui``. The server renders every page, and all pages except the
live tail work without JavaScript. The script shows times in local time, fills the live tail and refreshes the page.
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
    """Return the routes of the console, relative to where they are mounted.

    ``decode`` turns a value with a schema into text for a page. ``documents`` turns it into a document that JSON paths
    are applied to.
    """
    topics, records = TopicPages(console), RecordPages(console, decode, documents)
    groups, transactions = GroupPages(console), TransactionPages(console)
    of_topic = "/topics/{topic}"
    of_record = of_topic + "/records/{partition}/{offset}"
    return [
        console.route("/", topics.list_topics),
        console.route(of_topic, topics.show_topic),
        console.route(of_topic + "/partitions/{partition}", topics.show_partition),
        console.route(of_topic + "/config", topics.show_config_form),
        console.form(of_topic + "/config", topics.change_config),
        console.route(of_topic + "/delete", topics.show_delete_form),
        console.form(of_topic + "/delete", topics.delete_topic),
        console.route(of_topic + "/records", records.search_records),
        console.route(of_record, records.show_record),
        console.route(of_record + "/value", records.download_value),
        console.route(of_topic + "/tail", records.show_tail),
        Route(of_topic + "/tail/events", records.stream_events, methods=["GET"]),
        console.route("/groups", groups.list_groups),
        console.route("/groups/group", groups.show_group),
        console.route("/groups/reset", groups.show_reset_form),
        console.form("/groups/reset", groups.reset_offsets),
        console.route("/transactions", transactions.list_producers),
        console.route("/transactions/abort", transactions.show_abort_form),
        console.form("/transactions/abort", transactions.abort_transaction),
        console.route("/damage", DamagePages(console).show_damage),
        Route("/static/{name}", console.static, methods=["GET"]),
        Route("/{rest:path}", console.not_found, methods=["GET"]),
    ]
