"""The generated modules are what the generator writes, and are imported when they are needed."""

from __future__ import annotations

import subprocess
import sys

from segmentlog.server.codec.apis import APIS
from tools.codec.condense import API_KEYS
from tools.codec.generate import GENERATED, generate


def test_the_generated_modules_are_up_to_date(tmp_path):
    """``make codec`` changes nothing, byte for byte."""
    generate(tmp_path)
    made = {path.name: path.read_bytes() for path in tmp_path.glob("*.py")}
    assert made == {path.name: path.read_bytes() for path in GENERATED.glob("*.py")}


def test_every_api_is_there():
    """Each API that is wanted has a codec with its four functions and its two classes."""
    assert tuple(APIS) == API_KEYS
    for api in APIS.values():
        for kind in ("request", "response"):
            assert callable(getattr(api.codec, f"decode_{kind}"))
            assert callable(getattr(api.codec, f"encode_{kind}"))
            assert hasattr(api.codec, f"{api.name}{kind.capitalize()}")


def test_messages_are_imported_when_they_are_needed():
    """A server that starts imports no message, and one that was asked for something imports that alone."""
    script = """
import sys
from segmentlog.server.codec.apis import APIS
def messages():
    return [name for name in sys.modules if name.startswith("segmentlog.server.codec.generated.")]
assert messages() == [], messages()
APIS[18].codec
assert messages() == ["segmentlog.server.codec.generated.api_versions"], messages()
"""
    subprocess.run([sys.executable, "-c", script], check=True)
