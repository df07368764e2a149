"""Condense the message schemas in a kafka-clients jar: ``python -m tools.codec.condense JAR VERSION``.

The result is one file, which `generate` reads. It contains the facts that the codec depends on: names, types, versions,
nullability, tags, defaults, and whether an encoder may omit a value. Comments and descriptions are left out.
"""

from __future__ import annotations

import json
import re
import sys
import zipfile
from pathlib import Path
from typing import Any, Final

SCHEMAS: Final = Path(__file__).parent / "schemas"

API_KEYS: Final = (
    *(0, 1, 2, 3),
    *range(8, 34),
    *(35, 36, 37, 42, 44, 46, 47, 60, 61, 65, 66, 68, 69, 75),
)
"""APIs that `segmentlog serve` may support."""

DATA: Final = ("ConsumerProtocolAssignment", "ConsumerProtocolSubscription")
"""Messages inside of messages: subscriptions and assignments of the members of a group."""

_COMMENT: Final = re.compile(r"^\s*//.*$", re.MULTILINE)
_KEPT: Final = {
    "name": "name",
    "type": "type",
    "versions": "versions",
    "nullableVersions": "nullable",
    "taggedVersions": "tagged",
    "tag": "tag",
    "default": "default",
    "ignorable": "ignorable",
}


def condense(jar: Path, version: str) -> dict[str, Any]:
    """Return the schemas of the messages of `API_KEYS` and `DATA`, by name."""
    messages = {}
    with zipfile.ZipFile(jar) as archive:
        for name in sorted(archive.namelist()):
            if name.startswith("common/message/") and name.endswith(".json"):
                schema = json.loads(_COMMENT.sub("", archive.read(name).decode()))
                if _is_selected(schema):
                    messages[schema["name"]] = _message(schema)
    return {
        "source": f"Apache Kafka {version}, common/message/*.json in kafka-clients; condensed to facts",
        "licence": "Apache-2.0",
        "messages": messages,
    }


def _is_selected(schema: dict[str, Any]) -> bool:
    if schema["type"] == "data":
        return schema["name"] in DATA
    return schema["type"] in ("request", "response") and schema["apiKey"] in API_KEYS


def _message(schema: dict[str, Any]) -> dict[str, Any]:
    message = {"type": schema["type"]}
    if "apiKey" in schema:
        message["api_key"] = schema["apiKey"]
    message["versions"] = schema["validVersions"]
    message["flexible"] = schema["flexibleVersions"]
    if schema.get("latestVersionUnstable"):
        message["latest_unstable"] = True
    if "commonStructs" in schema:
        message["structs"] = {
            struct["name"]: [_field(field) for field in struct["fields"]] for struct in schema["commonStructs"]
        }
    message["fields"] = [_field(field) for field in schema["fields"]]
    return message


def _field(schema: dict[str, Any]) -> dict[str, Any]:
    field = {ours: schema[theirs] for theirs, ours in _KEPT.items() if theirs in schema}
    if not field.get("ignorable"):
        field.pop("ignorable", None)
    if "default" in field:
        field["default"] = str(field["default"])
    if "fields" in schema:
        field["fields"] = [_field(inner) for inner in schema["fields"]]
    return field


def dump(value: Any, indent: str = "") -> str:
    """Return JSON with one field a line, so that a diff shows what another version of Kafka changes."""
    if isinstance(value, dict) and any(isinstance(inner, dict | list) for inner in value.values()):
        inside = [f"{indent}  {json.dumps(key)}: {dump(inner, indent + '  ')}" for key, inner in value.items()]
        return "{\n" + ",\n".join(inside) + f"\n{indent}}}"
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(f"{indent}  {dump(inner, indent + '  ')}" for inner in value) + f"\n{indent}]"
    return json.dumps(value)


def main() -> None:
    """Write ``schemas/kafka-VERSION.json``."""
    jar, version = sys.argv[1:]
    (SCHEMAS / f"kafka-{version}.json").write_text(dump(condense(Path(jar), version)) + "\n")


if __name__ == "__main__":
    main()
