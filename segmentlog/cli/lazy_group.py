"""A click group whose commands are imported when they are called."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import click

from segmentlog import __version__
from segmentlog.cli.common import end_loading
from segmentlog.speedups import CORE_NAME

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


def _add_global_options(command: click.Command) -> None:
    """Let a command and its subcommands accept --dir and --version too, because users type them at the end."""
    taken = {name for param in command.params for name in param.opts}
    for name, make in (("--dir", _directory_option), ("--version", _version_option)):
        if name not in taken:
            command.params.append(make())
    if isinstance(command, click.Group) and not isinstance(command, LazyGroup):
        for below in command.commands.values():
            _add_global_options(below)


def _directory_option() -> click.Option:
    def store_directory(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
        if value is not None:
            ctx.find_root().params["directory"] = value
            at: click.Context | None = ctx
            while at is not None:
                at.obj, at = value, at.parent

    return click.Option(
        ["--dir", "directory_after"], metavar="PATH", hidden=True, expose_value=False, callback=store_directory
    )


def _version_option() -> click.Option:
    def show(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            click.echo(f"segmentlog, version {__version__} ({CORE_NAME})")
            ctx.exit()

    return click.Option(
        ["--version", "program_version"], is_flag=True, is_eager=True, hidden=True, expose_value=False, callback=show
    )


class LazyGroup(click.Group):
    """Commands that are imported when they are called.

    ``locations`` maps the name of a command to its location (``module:attribute``) and its short help. ``aliases`` maps
    old names, which the help does not list, to commands.
    """

    def __init__(
        self,
        *args: Any,
        locations: dict[str, tuple[str, str]],
        aliases: Mapping[str, str] = MappingProxyType({}),
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._locations, self._aliases = locations, aliases

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._locations)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        cmd_name = self._aliases.get(cmd_name, cmd_name)
        if cmd_name not in self._locations:
            return None
        module_name, _, attribute = self._locations[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module_name), attribute)
        assert isinstance(command, click.Command)
        _add_global_options(command)
        end_loading()
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self._locations.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete names of commands, without importing their modules."""
        from click.shell_completion import CompletionItem

        names = [
            CompletionItem(name, help=text)
            for name, (_, text) in self._locations.items()
            if name.startswith(incomplete)
        ]
        return [*names, *super(click.Group, self).shell_complete(ctx, incomplete)]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            import difflib

            close = difflib.get_close_matches(args[0], self._locations, n=1)
            hint = f" Did you mean '{close[0]}'?" if close else ""
            raise click.UsageError(f"{error.message}{hint}", ctx) from None
