"""Looks at a page of kafka-viewer, as a browser would: page.py CONFIG TOPIC. Answers in JSON what it shows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import kafka_viewer.ui
from streamlit.testing.v1 import AppTest


def main() -> None:
    """Choose the topic, and load it from its beginning."""
    config, topic = sys.argv[1:3]
    sys.argv = ["ui.py", "--config", config]
    page = AppTest.from_file(str(Path(kafka_viewer.ui.__file__)), default_timeout=60).run()
    topics = page.selectbox[0].options
    page.selectbox[0].select(topic)
    page.radio[0].set_value("From beginning").run()
    next(button for button in page.button if "Load" in button.label).click().run()
    print(json.dumps({
        "topics": topics,
        "metrics": {one.label: one.value for one in page.metric},
        "places": [one.label for one in page.expander],
        "values": [one.value for one in page.code],
        "errors": [str(one.value) for one in [*page.error, *page.exception]],
    }))  # fmt: skip


main()
