"""A store with an example of everything that the console shows, including hostile texts."""

from __future__ import annotations

import json
from html.parser import HTMLParser

from segmentlog.records import TopicPartition
from segmentlog.store import LogStore

HOSTILE = [
    "<script>document.title='pwned'</script>",
    '"><img src=x onerror="document.title=\'pwned\'">',
    "javascript:document.title='pwned'",
    "'; document.title='pwned'; '",
    "{{ 7 * 7 }}{% raw %}",
    "\u202eevil\u202c\u200f right to left",
    "nul \0 escape \x1b[31m red",
    "</textarea></pre></table></script><!--",
]
"""Texts that a careless page would interpret as HTML or script."""
ORDERS = 1200


def fill(store: LogStore) -> None:
    """Create topics, records, groups and transactions."""
    store.create_topic("orders", 3, {"segment.bytes": "4KiB", "retention.ms": "30d", "fsync": "always"})
    store.create_topic("customers", 2, {"cleanup.policy": "compact", "segment.records": 100})
    store.create_topic("hostile", 1)
    store.create_topic("empty", 1)
    for number in range(3):
        values = [
            json.dumps({"order": at, "user": {"id": at % 7, "name": f"User {at % 7}"}, "items": [{"price": at * 1.5}]})
            for at in range(number, ORDERS, 3)
        ]
        for begin in range(0, len(values), 50):
            these = range(begin, begin + 50)
            store.topic("orders").partition(number).append(
                [values[at].encode() for at in these],
                keys=[f"user-{at % 7}".encode() for at in these],
                headers=[[("trace", b"%d" % at), ("source", b"shop")] for at in these],
            )
    customers = store.topic("customers").partition(0)
    for turn in range(6):
        customers.append(
            [b'{"turn": %d, "customer": %d}' % (turn, at) for at in range(100)], keys=[b"c%d" % at for at in range(100)]
        )
    customers.compact()
    hostile = store.topic("hostile").partition(0)
    for text in HOSTILE:
        data = text.encode()
        hostile.append([data], keys=[data], headers=[[(text, data)]])
        hostile.append([json.dumps({text: [text]}).encode()])
    hostile.append([b"\xff\xfe\x00 no UTF-8 \x80"], keys=[b"\xc3\x28"])
    hostile.append([b"<b>large</b>" * 87_000])
    hostile.append([None, b""], keys=[b"tombstone", b""])
    for name in ("billing", *HOSTILE):
        store.groups.reset(name, {TopicPartition("orders", at): 20 * at for at in range(3)})
    with store.producer(name="etl-1") as producer, producer.transaction():
        producer.send("orders", b'{"order": -1}')


class Page(HTMLParser):
    """The elements of a page with their attributes, and its text."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Add one element."""
        self.elements.append((tag, dict(attrs)))
        if tag in ("dt", "dd", "th", "td", "li", "p", "h1", "h2", "option"):
            self.text += " "

    def handle_data(self, data: str) -> None:
        """Add the text between elements."""
        self.text += data
