"""Make config.md and cli.md from the code: ``python docs/generate.py``. A test says when that is due."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click

from segmentlog.cli import cli
from segmentlog.config import _KINDS, TopicConfig
from segmentlog.policy.kafka_configs import SETTINGS, describe, engine_keys
from segmentlog.server.api_table import SERVED
from segmentlog.server.codec.apis import APIS

HERE: Final = Path(__file__).parent
_WIDTH: Final = 110

_CONFIG: Final = """\
# Settings of a topic

Kafka's keys with Kafka's meanings, and a few of ours. Dots on the command line (`segmentlog create -c
segment.bytes=16MiB`), underscores in Python (`segment_bytes="16MiB"`). Sizes read `64MiB`, times `7d` or `1h30m`. They
change while a topic is in use (`segmentlog alter`, `store.alter_topic`); `segmentlog details` shows them.

What each `fsync` policy gives is in [durability.md](durability.md#fsync-policies), what retention and compaction do in
[retention.md](retention.md). This page is made by `docs/generate.py`.

"""

_CLI: Final = """\
# The command line

`python -m segmentlog` is the same program. Results go to stdout, everything else to stderr. A closed pipe (`| head`)
is no failure. This page is made by `docs/generate.py`, of what `--help` says.

## Exit statuses

| status | meaning |
|---:|---|
| 0 | done |
| 1 | failed; one line on stderr says what happened and what to do |
| 2 | wrong usage |
| 3 | damage was found |
| 4 | no damage, but a batch whose checksum is right and whose records do not decode |

## Shell completion

Commands, options and names of topics. In `~/.bashrc` (bash 4.4 or newer):

```sh
eval "$(_SEGMENTLOG_COMPLETE=bash_source segmentlog)"
```

In `~/.zshrc` with `zsh_source`; for fish, in `~/.config/fish/completions/segmentlog.fish`:

```sh
_SEGMENTLOG_COMPLETE=fish_source segmentlog | source
```
"""


_SERVER: Final = """\
# What the server answers

For each request of Kafka's protocol the versions that are answered. ApiVersions of a version that is not known is
answered as Kafka does, so that newer clients ask again; Produce is announced from version 0 on, which old clients look
for, and answered from 3 on. This page is made by `docs/generate.py`.
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


def config_page() -> str:
    """Every key with its default, what it takes and what it means."""
    lines = ["| key | default | takes | meaning |", "|---|---|---|---|"]
    for key, value, _, meaning in TopicConfig().describe():
        takes = _KINDS[key.replace(".", "_")].accepted.replace("|", "\\|").replace("<n>", "*n*")
        lines.append(f"| `{key}` | `{value}` | {takes} | {meaning} |")
    return _CONFIG + "\n".join(lines) + "\n"


def cli_page() -> str:
    """What each command says of itself."""
    parts = [_CLI]
    for name, text in _helps(cli, "segmentlog", None):
        parts.append(f"## {name}\n\n```text\n{text}\n```\n")
    return "\n".join(parts)


def server_page() -> str:
    """What the server answers, and what Kafka's keys of a topic become."""
    lines = [_SERVER, "## Requests", "", "| key | request | versions |", "|---:|---|---|"]
    for key in SERVED:
        api = APIS[key]
        lines.append(f"| {key} | {api.name} | {api.min_version} to {api.max_version} |")
    lines += ["", _SETTINGS, "| key | where nothing is set | with us |", "|---|---|---|"]
    for entry in describe(TopicConfig()):
        lines.append(f"| `{entry.name}` | `{entry.value or ' '}` | {_with_us(entry.name)} |")
    return "\n".join(lines) + "\n"


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


def _helps(command: click.Command, name: str, parent: click.Context | None) -> Iterator[tuple[str, str]]:
    settings = {**command.context_settings, "terminal_width": _WIDTH, "max_content_width": _WIDTH}
    with click.Context(command, info_name=name.rpartition(" ")[2], parent=parent, **settings) as context:
        yield name, "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
        if isinstance(command, click.Group):
            for one in command.list_commands(context):
                inner = command.get_command(context, one)
                assert inner is not None
                yield from _helps(inner, f"{name} {one}", context)


PAGES: Final = {"config.md": config_page, "cli.md": cli_page, "server-reference.md": server_page}

if __name__ == "__main__":
    for name, make in PAGES.items():
        (HERE / name).write_text(make())
