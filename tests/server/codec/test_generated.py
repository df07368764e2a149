"""The generated classes hold every fact of the schemas, and their codecs are compiled when they are needed."""

from __future__ import annotations

import json
import subprocess
import sys
import traceback

import pytest
from codec_samples import MESSAGES

from segmentlog.server.api_table import SERVED
from segmentlog.server.codec.apis import APIS
from segmentlog.server.codec.compiler import namespace_of, source_of
from segmentlog.server.codec.generated import sasl_handshake
from segmentlog.server.codec.layouts import StructLayout
from segmentlog.server.codec.primitives import MalformedMessage
from segmentlog.server.codec.wire_types import parse_versions
from tools.codec.condense import API_KEYS
from tools.codec.generate import GENERATED, SCHEMAS, generate, snake


def test_the_generated_modules_are_up_to_date(tmp_path):
    """``make codec`` changes nothing, byte for byte."""
    generate(tmp_path)
    made = {path.name: path.read_bytes() for path in tmp_path.glob("*.py")}
    assert made == {path.name: path.read_bytes() for path in GENERATED.glob("*.py")}


def test_layouts_hold_every_fact_of_the_schemas():
    """Each field has the type, versions, null, tag and default of Kafka's schema, in every version of its message."""
    messages = json.loads(SCHEMAS.read_text())["messages"]
    assert list(MESSAGES) == sorted(messages)
    for name, facts in messages.items():
        layout = MESSAGES[name]
        assert layout.versions == parse_versions(facts["versions"])
        flexible = parse_versions(facts["flexible"])
        assert all((version in layout.flexible) == (version in flexible) for version in layout.versions)
        assert_facts(layout.struct, facts["fields"], facts.get("structs", {}), list(layout.versions))


def assert_facts(struct: StructLayout, fields: list, shared: dict, versions: list[int]) -> None:
    """Check that each field of ``struct`` is as in the schema, in the versions that have the struct."""
    used = [facts for facts in fields if any(version in parse_versions(facts["versions"]) for version in versions)]
    assert [field.name for field in struct.fields] == [snake(facts["name"]) for facts in used]
    for field, facts in zip(struct.fields, used, strict=True):
        label = f"{struct.name}.{field.name}"
        assert facts["type"] == "[]" * field.is_array + field.kind, label
        own = [version for version in versions if version in field.versions]
        for version in versions:
            assert (version in field.versions) == (version in parse_versions(facts["versions"])), label
        for version in own:
            assert (version in field.nullable) == (version in parse_versions(facts.get("nullable", "none"))), label
            assert (version in field.tagged) == (version in parse_versions(facts.get("tagged", "none"))), label
        assert field.tag == facts.get("tag", -1), label
        assert own == versions or field.ignorable == facts.get("ignorable", False), label
        default = facts.get("default", "").lower()
        if default and not field.is_array and field.struct is None:
            expected = (default.replace("null", "none"), str(_number(default)))
            assert field.default.strip("'").lower() in expected, label
        if field.struct is not None:
            assert_facts(field.struct, facts.get("fields") or shared[field.kind], shared, own)


def _number(text: str) -> int | None:
    try:
        return int(text, 0)
    except ValueError:
        return None


def test_every_api_is_there():
    """Each API that is served has a codec with its four functions and its two classes, and no other API has one."""
    assert tuple(APIS) == API_KEYS == SERVED
    for api in APIS.values():
        for kind in ("request", "response"):
            assert callable(getattr(api.codec, f"decode_{kind}"))
            assert callable(getattr(api.codec, f"encode_{kind}"))
            assert hasattr(api.codec, f"{api.name}{kind.capitalize()}")


def test_messages_are_imported_when_they_are_needed():
    """A server that starts imports no message; the first request of an API imports the module of that API."""
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


@pytest.mark.parametrize("name", MESSAGES)
def test_versions_with_one_layout_share_one_function(name):
    """A message compiles one decoder and one encoder for each layout, whichever version asks first."""
    layout = MESSAGES[name]
    for verb in ("decode", "encode"):
        sources = {
            version: source_of(layout, verb, version).replace(f"_{version}(", "(") for version in layout.versions
        }
        for version, source in sources.items():
            assert source == sources[layout.first_alike(version)]
        assert len(set(sources.values())) == len(layout.bounds)


def test_a_traceback_shows_the_line_of_a_compiled_function():
    """Compiled code has no file; its lines are in the traceback all the same."""
    message = sasl_handshake.SaslHandshakeRequest(mechanism=1)
    with pytest.raises(AttributeError) as caught:
        sasl_handshake.encode_request(message, 1)
    text = "".join(traceback.format_exception(caught.value))
    assert "<encode SaslHandshakeRequest 0>" in text
    assert "message.mechanism.encode()" in text


def test_compiled_functions_are_kept():
    """The second message of a version compiles nothing."""
    encoded = memoryview(b"".join(sasl_handshake.encode_request(sasl_handshake.SaslHandshakeRequest("PLAIN"), 0)))
    names = dict(namespace_of(sasl_handshake.SaslHandshakeRequest))
    for version in (0, 1):
        assert sasl_handshake.decode_request(encoded, 0, version).mechanism == "PLAIN"
        with pytest.raises(MalformedMessage, match=f"SaslHandshakeRequest of version {version}"):
            sasl_handshake.decode_request(encoded[:1], 0, version)
    assert namespace_of(sasl_handshake.SaslHandshakeRequest)["encode_0"] is names["encode_0"]
    assert "encode_1" not in namespace_of(sasl_handshake.SaslHandshakeRequest)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["FetchRequest", "17"], "def decode_17(data, at):"),
        (["ConsumerProtocolSubscription", "3"], "def encode_3(message):"),
        (["FetchRequest", "99"], "FetchRequest has versions 4 to 18, not 99"),
        (["Fetch", "1"], "Fetch is not a message"),
    ],
)
def test_the_code_of_a_version_can_be_read(arguments, shown):
    """``python -m tools.codec.show`` prints both functions, or says which messages and versions exist."""
    done = subprocess.run([sys.executable, "-m", "tools.codec.show", *arguments], capture_output=True, text=True)
    assert shown in done.stdout + done.stderr
    assert (done.returncode == 0) == ("def " in shown)
    assert "Traceback" not in done.stderr
