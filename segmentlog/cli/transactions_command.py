"""``segmentlog transactions``: list the transactions of named producers, and abort one that hangs."""

from __future__ import annotations

import difflib

import click

from segmentlog.cli.common import open_store, say
from segmentlog.cli.option_types import json_option
from segmentlog.cli.table_output import show_json, show_table
from segmentlog.quantities import format_time


@click.group()
def transactions() -> None:
    """List the transactions of producers, and abort one that hangs."""


@transactions.command("list")
@json_option
@click.pass_context
def list_transactions(ctx: click.Context, as_json: bool) -> None:
    """List the named producers, the state of their last transaction, and whether their process is running.

    Producers without a name appear under generated names that begin with ~. An Ongoing transaction is not decided.
    In PrepareCommit and PrepareAbort it is decided, but some of its markers are not written yet. Other states are
    final. Of a client of a server, only the server knows whether it is running.
    """
    rows = []
    with open_store(ctx, read_only=True) as store:
        coordinator = store.transactions
        states = coordinator.states()
        names = store.topic_names({partition.topic_id for state in states.values() for partition in state.partitions})
        for name, state in sorted(states.items()):
            is_alive = None if state.is_server_name else coordinator.is_alive(name, state)
            since_ms = state.started_ms if state.is_open else state.updated_ms
            partitions = [
                f"{names.get(partition.topic_id, partition.topic_id)}/{partition.partition}"
                for partition in state.partitions
            ]
            if as_json:
                show_json(
                    {
                        "producer": name,
                        "producer_id": state.producer_id,
                        "epoch": state.epoch,
                        "status": state.status,
                        "since_ms": since_ms,
                        "timeout_ms": state.timeout_ms,
                        "partitions": partitions,
                        "alive": is_alive,
                    }
                )
            timeout = f"{state.timeout_ms / 1000:g} s"
            alive = "a client" if is_alive is None else "alive" if is_alive else "gone"
            rows.append((name, str(state.producer_id), state.epoch, state.status, format_time(since_ms), timeout, alive,
                         ", ".join(partitions)))  # fmt: skip
    if rows and not as_json:
        show_table(("producer", "id", "epoch", "status", "since", "timeout", "process", "partitions"), rows)
    if not rows:
        say("there are no named producers and no transactions")


@transactions.command()
@click.argument("name")
@click.pass_context
def abort(ctx: click.Context, name: str) -> None:
    """Abort the open transaction of producer NAME, and fence the producer: it cannot append any more."""
    with open_store(ctx, background=False) as store:
        coordinator = store.transactions
        states = coordinator.states()
        if name not in states:
            close = difflib.get_close_matches(name, states, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "'segmentlog transactions list' lists the producers"
            raise click.ClickException(f"producer {name!r}: it does not exist; {hint}")
        if coordinator.abort_by_name(name):
            say(f"aborted the transaction of {name}, and fenced its producer")
        else:
            state = coordinator.states().get(name, states[name])
            say(f"{name} has no transaction to abort: {state.status}")
