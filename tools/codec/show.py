"""Print the code that encodes and decodes a message: ``python -m tools.codec.show FetchRequest 12``."""

from __future__ import annotations

import re
import sys
from importlib import import_module

from segmentlog.server.codec.compiler import source_of
from segmentlog.server.codec.layouts import layout_of
from tools.codec.generate import CODEC, snake


def main() -> None:
    """Print the decoder and the encoder of a version; an unknown name or version ends the command with a message."""
    name, text = sys.argv[1:]
    api = "consumer_protocol" if name.startswith("ConsumerProtocol") else snake(re.sub("(Request|Response)$", "", name))
    try:
        layout = layout_of(getattr(import_module(f"{CODEC}.generated.{api}"), name))
    except (ImportError, AttributeError):
        sys.exit(f"{name} is not a message of {CODEC}.generated, such as FetchRequest or FetchResponse")
    if int(text) not in layout.versions:
        sys.exit(f"{name} has versions {layout.versions[0]} to {layout.versions[-1]}, not {text}")
    for verb in ("decode", "encode"):
        sys.stdout.write(source_of(layout, verb, layout.first_alike(int(text))) + "\n")


if __name__ == "__main__":
    main()
