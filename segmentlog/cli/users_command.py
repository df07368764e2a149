"""``segmentlog users``: manage the users that may connect to the server."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, Final

import click

from segmentlog.cli.common import check_stdin, exit_at_once_on_signals, open_store, require_local_folder, say
from segmentlog.cli.option_types import json_option
from segmentlog.cli.table_output import show_json, show_table
from segmentlog.format.file_names import STORE_FILE, USERS_FILE

_PASSWORD_MAX_BYTES: Final = 4096


def _users_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--users",
        "path",
        type=click.Path(dir_okay=False),
        metavar="FILE",
        help=f"The users file.  [default: {USERS_FILE} in the store]",
    )(command)


@click.group()
def users() -> None:
    """Add, remove and list the users that may connect over Kafka's protocol.

    Running servers apply changes within a second.
    """


@users.command()
@click.argument("name")
@_users_option
@click.option("--password-stdin", is_flag=True, help="Read the password from the first line of stdin.")
@click.option(
    "--iterations", type=int, metavar="N", help="Number of hash iterations, 4096 to 1000000.  [default: 16384]"
)
@click.pass_context
def add(ctx: click.Context, name: str, path: str | None, password_stdin: bool, iterations: int | None) -> None:
    """Add user NAME, or change its password, for PLAIN, SCRAM-SHA-256 and SCRAM-SHA-512.

    Asks for the password. The users file stores salted hashes, not the password.
    """
    with exit_at_once_on_signals():
        from segmentlog.security.security_errors import InvalidUser
        from segmentlog.security.users import DEFAULT_ITERATIONS, add_user, check_name, check_password

    try:
        check_name(name)  # before asking for a password
        if path is None:
            require_local_folder(ctx)
        password = _read_password() if password_stdin else _ask_password(name)
        iterations = DEFAULT_ITERATIONS if iterations is None else iterations
        check_password(password, iterations)  # before creating a store
        path = path or _default_path(ctx, create=True)
        is_new = add_user(path, name, password, iterations=iterations)
    except InvalidUser as error:
        raise click.ClickException(str(error)) from None
    say(f"added {name} to {path}" if is_new else f"{name} has a new password")


@users.command()
@click.argument("name")
@_users_option
@click.pass_context
def remove(ctx: click.Context, name: str, path: str | None) -> None:
    """Remove user NAME. Its open connections continue until they are closed."""
    with exit_at_once_on_signals():
        from segmentlog.security.users import list_users, remove_user

    path = path or _default_path(ctx)
    if not remove_user(path, name):
        import difflib

        close = difflib.get_close_matches(name, [user.name for user in list_users(path)], n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise click.ClickException(f"there is no user {name!r} in {path}{hint}")
    say(f"removed {name} from {path}")


@users.command("list")
@_users_option
@json_option
@click.pass_context
def list_(ctx: click.Context, path: str | None, as_json: bool) -> None:
    """List the users, and their authentication mechanisms."""
    with exit_at_once_on_signals():
        from segmentlog.security.users import list_users

    path = path or _default_path(ctx)
    found = list_users(path)
    for user in found:
        if as_json:
            show_json({"user": user.name, "mechanisms": list(user.mechanisms), "iterations": user.iterations})
    if found and not as_json:
        rows = [(user.name, ", ".join(user.mechanisms), user.iterations) for user in found]
        show_table(("user", "mechanisms", "iterations"), rows)
    if not found:
        say(f"there are no users in {path}: no client can log in")


def _default_path(ctx: click.Context, *, create: bool = False) -> str:
    """Return the path of the users file in the store; with ``create``, create a missing store."""
    folder = require_local_folder(ctx)
    if create and not os.path.exists(f"{folder}/{STORE_FILE}"):
        with open_store(ctx, create=True, background=False):
            pass
    return f"{folder}/{USERS_FILE}"


def _read_password() -> str:
    check_stdin()
    line = sys.stdin.buffer.readline(_PASSWORD_MAX_BYTES + 1)
    if len(line) > _PASSWORD_MAX_BYTES:
        raise click.ClickException(f"the password has more than {_PASSWORD_MAX_BYTES} bytes")
    try:
        return line.removesuffix(b"\n").removesuffix(b"\r").decode()
    except UnicodeDecodeError:  # the error must not contain what was read
        raise click.ClickException("the password is not UTF-8") from None


def _ask_password(name: str) -> str:
    if not sys.stdin.isatty():
        raise click.UsageError("the password cannot be asked for without a terminal: give --password-stdin")
    return str(click.prompt(f"Password for {name}", hide_input=True, confirmation_prompt=True, err=True))
