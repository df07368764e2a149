"""Generate the pages in `PAGES` from the code: ``python docs/generate.py``. A test fails when a page is out of date."""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click

import segmentlog
from segmentlog import errors
from segmentlog.cli import cli
from segmentlog.config import _KINDS, FSYNC_ACCEPTED, TopicConfig
from segmentlog.policy.kafka_configs import SETTINGS, describe, engine_keys
from segmentlog.records import LostRange
from segmentlog.server.api_table import SERVED
from segmentlog.server.codec.apis import APIS

HERE: Final = Path(__file__).parent
_WIDTH: Final = 110

_CONFIG: Final = """\
# Settings of a topic

For people who create or change a topic. Most keys are Kafka's and have Kafka's meaning.

- Write dots on the command line (`segmentlog create -c segment.bytes=16MiB`), underscores in Python
  (`segment_bytes="16MiB"`). Sizes are written `64MiB`, times `7d` or `1h30m`.
- You can change a setting while the topic is in use: `segmentlog alter`, `store.alter_topic`. `segmentlog describe`
  shows the settings.
- [durability.md](durability.md#fsync-policies) explains the `fsync` policies, [retention.md](retention.md) retention
  and compaction, [tiered-storage.md](tiered-storage.md) the `remote` and `local` keys.

`docs/generate.py` makes this page.

"""

_CLI: Final = """\
# Command line

For people who look up a command or an option. [commands.md](commands.md) is a guide to the commands for daily work.

`python -m segmentlog` is the same program as `segmentlog`. Results go to stdout, everything else to stderr. A closed
pipe (`| head`) is not an error. `docs/generate.py` makes this page from the output of `--help`.

## Exit statuses

| status | meaning |
|---:|---|
| 0 | done |
| 1 | failed; one line on stderr says what happened and what to do ([errors.md](errors.md)) |
| 2 | wrong usage |
| 3 | damage was found ([damage.md](damage.md)) |
| 4 | no damage, but an unreadable batch: its checksum is right, and its records do not decode |

## Shell completion

The shell completes commands, options and names of topics. Add to `~/.bashrc` (bash 4.4 or newer):

```sh
eval "$(_SEGMENTLOG_COMPLETE=bash_source segmentlog)"
```

For zsh add the same line with `zsh_source` to `~/.zshrc`. For fish create `~/.config/fish/completions/segmentlog.fish`:

```sh
_SEGMENTLOG_COMPLETE=fish_source segmentlog | source
```
"""


_SERVER: Final = """\
# Requests of Kafka's protocol

For people who want to know whether a Kafka client or tool works with `segmentlog serve`. The table lists the versions
of each request that the server answers.

The server answers ApiVersions of an unknown version as Kafka does, so that newer clients ask again. It announces
Produce from version 0 on, because old clients expect that, and answers it from version 3 on. `docs/generate.py` makes
this page.
"""

_SETTINGS: Final = """\
## Settings of a topic

CreateTopics, IncrementalAlterConfigs and AlterConfigs take every setting that Kafka 4.4.0 has, and check each value by
Kafka's rules; any other key is refused (INVALID_CONFIG). A setting that changes nothing is accepted, the server logs a
warning that names it and the reason, and DescribeConfigs returns the value that holds, with the reason as its
documentation. [config.md](config.md) has the meanings. Numbers are plain here, in bytes and milliseconds; -1 or
9223372036854775807 are without limit.

Values that Kafka accepts and that are refused here: `max.message.bytes` of 0 or above 512 MiB, `file.delete.delay.ms`
above 100 years, `retention.bytes` below -1. Accepted here and not by Kafka: `segment.bytes` from 256 bytes on (Kafka: 1
MiB), units (`7d`, `64MiB`), `none` for `uncompressed`, words in any case.
"""


_ERRORS: Final = """\
# Errors

For developers and operators who got an exception. Each section says what the exception means, what caused it, what
happened to the data, and what to do. Search this page for a part of the message.

All exceptions derive from `SegmentlogError` and can be imported from `segmentlog`. They have their facts as attributes
and can be pickled. The exceptions of the schema registry are in [api.md](api.md#schemas). This page is made by
`docs/generate.py` from `segmentlog/errors.py`.

Five exceptions had other names before, which still work: `GrantExhausted` (`OffsetGrantExhausted`), `GroupHeld`
(`GroupInUse`), `LocalError` (`ProcessLimitError`), `NotShipped` (`ShipUnconfirmed`) and `ProducerHeld`
(`ProducerNameInUse`). `segmentlog.errors` also has `OtherInput` (`InputMismatch`).
"""

_ERROR_GROUPS: Final = {
    "Base class": (errors.SegmentlogError(),),
    "Arguments and records": (
        errors.InvalidConfig("fsync", "sometimes", FSYNC_ACCEPTED),
        errors.InvalidTopicName("a b", "only letters, digits, '.', '_' and '-' are allowed; found ' '"),
        errors.InvalidRecord("values", 0, "str", "bytes or None"),
        errors.RecordTooLarge(2_000_000, 1_048_588),
        errors.SerializationError("orders", "values", 0, "Object of type set is not JSON serializable"),
        errors.InvalidWireBatch("crc", "the header claims CRC32C 0x00000001, but the bytes have 0x9d6a7c11"),
    ),
    "Topics and stores": (
        errors.UnknownTopic("orders"),
        errors.TopicExists("orders"),
        errors.StoreVersionError("/srv/data", "there is no store here (no store.json); check the path, or create one"),
        errors.ReadOnlyStore("/srv/data", "create a topic"),
        errors.StoreClosed("store /srv/data"),
        errors.PartitionBusy("orders", "rename it"),
    ),
    "Reading": (
        errors.OffsetOutOfRange("orders/0", 5, 100, 200),
        errors.LogTruncated("orders/0", 15, LostRange(12, 1_000_012, 1, "the machine died")),
        errors.CorruptBatch("/srv/data/orders/0/00000000000000000000.log", 4096, "checksum 1a2b", "3c4d", 17),
        errors.UnreadableBatch("/srv/data/orders/0/00000000000000000000.log", 4096, "a record ends early", 17, 20, 3),
        errors.DeserializationError("orders", 0, 17, "value", "JSON is malformed", b"{"),
    ),
    "Disk, limits of the process, appends": (
        errors.DiskFull("/srv/data/orders/0/00000000000000000000.log", 65_536),
        errors.PartitionFailed("orders/0", "an fsync failed (Input/output error)"),
        errors.ProcessLimitError(24, "Too many open files; nothing was appended", "/srv/data/orders/0/lock"),
    ),
    "Producers and transactions": (
        errors.ProducerFenced("'etl-1'", 3, 4),
        errors.ProducerBusy("etl-1", "its transaction is being decided"),
        errors.ProducerNameInUse("etl-1", "a client of the server"),
        errors.OutOfOrderSequence("orders/0", 7, 10, 12),
        errors.TransactionAborted("'etl-1'", "no room on the disk"),
        errors.InputMismatch(),
    ),
    "Consumers and groups": (
        errors.ConsumerFenced("billing", "consumer-1", "does not have orders/0 any more"),
        errors.ConsumerBusy(1, 2),
        errors.GroupNotEmpty("billing", 2),
        errors.GroupInUse("billing", 2, "2 members of the server with pid 4711"),
    ),
    "Object store": (
        errors.ShipUnconfirmed("orders/0", 10, 12, "no process ships this store"),
        errors.OffsetGrantExhausted("orders/0", 1_000_000),
        errors.StoreFenced("store /srv/data", "host-2"),
        errors.HandOverInProgress("orders/0"),
        errors.ObjectStoreError("s3://bucket/store", "cannot put manifest.json", "access denied", False),
        errors.SegmentGone("s3://bucket/store", "segments/1/0/0-ab", "it does not exist"),
        errors.ConditionIgnored("s3://bucket/store", "manifest.json", "this object store ignores conditional writes"),
        errors.ShippingRefused("s3://bucket/store", "another store is shipped there; choose another place"),
    ),
    "Cluster": (
        errors.CoordinatorUnreachable("s3://bucket/orders", "cluster.json: no answer in time"),
        errors.CoordinatorRefused("s3://bucket/orders", "cluster.json: access denied"),
    ),
}
"""An example of each exception, with a message as users see it."""


def config_page() -> str:
    """Every key with its default, what it takes and what it means."""
    lines = ["| key | default | takes | meaning |", "|---|---|---|---|"]
    for key, value, _, meaning in TopicConfig().describe():
        takes = _KINDS[key.replace(".", "_")].accepted.replace("|", "\\|").replace("<n>", "*n*")
        lines.append(f"| `{key}` | `{value}` | {takes} | {meaning} |")
    return _CONFIG + "\n".join(lines) + "\n"


def cli_page() -> str:
    """Return the page with the help texts of all commands."""
    parts = [_CLI]
    for name, text in _helps(cli, "segmentlog", None):
        parts.append(f"## {name}\n\n```text\n{text}\n```\n")
    return "\n".join(parts)


def server_page() -> str:
    """Return the page with the requests that the server answers, and its settings for Kafka's keys of a topic."""
    lines = [_SERVER, "## Requests", "", "| key | request | versions |", "|---:|---|---|"]
    for key in SERVED:
        api = APIS[key]
        lines.append(f"| {key} | {api.name} | {api.min_version} to {api.max_version} |")
    lines += ["", _SETTINGS, "| key | where nothing is set | with us |", "|---|---|---|"]
    for entry in describe(TopicConfig()):
        lines.append(f"| `{entry.name}` | `{entry.value or ' '}` | {_with_us(entry.name)} |")
    return "\n".join(lines) + "\n"


def errors_page() -> str:
    """Each public exception: an example of its message, and the paragraphs of its docstring."""
    parts = [_ERRORS]
    shown = set()
    for group, examples in _ERROR_GROUPS.items():
        parts.append(f"## {group}\n")
        for example in examples:
            kind = type(example)
            shown.add(kind.__name__)
            bases = ", ".join(f"`{base.__name__}`" for base in kind.__mro__[1:-3] if base is not errors.SegmentlogError)
            parts.append(f"### {kind.__name__}\n\n{_error_text(kind)}\n")
            if bases:
                parts.append(f"Base class: {bases}.\n")
            if str(example):
                parts.append(f"```text\n{example}\n```\n")
    missing = {name for name in segmentlog.__all__ if name in vars(errors)} - shown
    assert not missing, f"_ERROR_GROUPS lacks {missing}"
    return "\n".join(parts)


def _error_text(kind: type) -> str:
    """Return a docstring as Markdown: a list for causes, data and remedies, a list for columns of names."""
    blocks = []
    for block in (inspect.getdoc(kind) or "").split("\n\n"):
        text = re.sub(r"``docs/(.*?)``", r"[\1](\1)", block)
        text = re.sub(r"``(.*?)``|`\.?(.*?)`", lambda found: f"`{found[1] or found[2]}`", text, flags=re.DOTALL)
        rows = re.findall(r"^(\S.*?) {2,}(\S.*)$", text, re.MULTILINE)
        if rows and len(rows) == text.count("\n") + 1:
            text = "\n".join(f"- `{name}`: {meaning}" for name, meaning in rows)
        label, colon, rest = text.partition(": ")
        if colon and label in ("Cause", "Data", "Remedy"):
            text = f"- **{label}**: {rest}".replace("\n", "\n  ")
            assert text[-1] == ".", kind
        blocks.append(text)
    text = "\n\n".join(blocks)
    assert all(f"- **{label}**: " in text for label in ("Cause", "Data", "Remedy")), kind
    return re.sub(r"\n\n(?=- \*\*(Data|Remedy))", "\n", text)


def _with_us(name: str) -> str:
    if name not in SETTINGS:
        return "ours alone"
    if why := SETTINGS[name].why:
        return f"checked, and changes nothing: {why}"
    keys = engine_keys(name)
    if keys == ("fsync",):
        return "`fsync`: each N messages, or each N ms; 1 message is `always`"
    if keys == ("compression.level",):
        return f"`compression.level`, where `compression.type` is {name.split('.')[1]}"
    if name == "remote.storage.enable":
        return "the same, once the store is shipped to an object store"
    return "the same"


def api_page() -> str:
    """Docstrings and signatures of all public names."""
    spec = importlib.util.spec_from_file_location("api_reference", HERE / "api_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page: str = module.api_page()
    return page


def _helps(command: click.Command, name: str, parent: click.Context | None) -> Iterator[tuple[str, str]]:
    settings = {**command.context_settings, "terminal_width": _WIDTH, "max_content_width": _WIDTH}
    with click.Context(command, info_name=name.rpartition(" ")[2], parent=parent, **settings) as context:
        yield name, "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
        if isinstance(command, click.Group):
            for one in command.list_commands(context):
                inner = command.get_command(context, one)
                assert inner is not None
                yield from _helps(inner, f"{name} {one}", context)


PAGES: Final = {
    "config.md": config_page,
    "cli.md": cli_page,
    "server-reference.md": server_page,
    "errors.md": errors_page,
    "api.md": api_page,
}

if __name__ == "__main__":
    for name, make in PAGES.items():
        (HERE / name).write_text(make())
