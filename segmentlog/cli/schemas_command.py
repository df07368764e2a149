"""``segmentlog schemas``: manage the schema registry of the store."""

from __future__ import annotations

import sys
from typing import Any

import click

from segmentlog.cli.common import EXIT_DONE, EXIT_FAILED, exit_at_once_on_signals, open_store, say
from segmentlog.cli.option_types import json_option
from segmentlog.cli.schema_values import read_schema, type_of_file
from segmentlog.cli.table_output import show_json, show_table

_TYPE = click.option(
    "--type", "schema_type", type=click.Choice(["AVRO", "JSON", "PROTOBUF"], case_sensitive=False),
    help="Type of the schema.  [default: by the name of FILE: .avsc, .json, .proto]",
)  # fmt: skip
_REFERENCES = click.option(
    "-r", "--reference", "references", multiple=True, metavar="NAME=SUBJECT:VERSION",
    help="A schema that this schema refers to by NAME.",
)  # fmt: skip


@click.group()
def schemas() -> None:
    """List, show, register, check and delete the schemas of the store, and set their compatibility.

    Programs reach the registry at the port of 'segmentlog http', like Confluent's registry.
    """


@schemas.command("list")
@click.argument("prefix", default="")
@click.option("--deleted", is_flag=True, help="Include softly deleted schemas.")
@json_option
@click.pass_context
def list_schemas(ctx: click.Context, prefix: str, deleted: bool, as_json: bool) -> None:
    """List the subjects whose names start with PREFIX, and the newest schema of each."""
    rows: list[tuple[object, ...]] = []
    with open_store(ctx, read_only=True) as store:
        registry = store.schemas
        for subject in registry.subjects(f":*:{prefix}", deleted=deleted):
            versions = registry.versions(subject, deleted=deleted)
            newest = registry.version(subject, versions[-1], deleted=deleted)
            level = registry.config(subject, default_to_global=True)["compatibilityLevel"]
            if as_json:
                show_json(
                    {"subject": subject, "versions": versions, "id": newest.id, "type": newest.schema_type,
                     "compatibility": level, "deleted": newest.deleted}
                )  # fmt: skip
            shown = ", ".join(map(str, versions)) + (" (deleted)" if newest.deleted else "")
            rows.append((subject, shown, newest.id, newest.schema_type, level))
    if rows and not as_json:
        show_table(("subject", "versions", "id", "type", "compatibility"), rows)
    if not rows:
        say("there are no schemas yet; 'segmentlog schemas register SUBJECT FILE' creates one")


@schemas.command()
@click.argument("subject", required=False)
@click.argument("version", default="latest")
@click.option("--id", "schema_id", type=click.IntRange(0), metavar="ID", help="The schema with this id.")
@json_option
@click.pass_context
def show(ctx: click.Context, subject: str | None, version: str, schema_id: int | None, as_json: bool) -> None:
    """Print VERSION of SUBJECT, or the schema with an id."""
    if (subject is None) == (schema_id is None):
        raise click.UsageError("give either SUBJECT or --id")
    with open_store(ctx, read_only=True) as store:
        registry = store.schemas
        if schema_id is not None:
            record = registry.by_id(schema_id)
        else:
            record = registry.version(str(subject), version, deleted=True)
    if not as_json:
        click.echo(record.schema.rstrip("\n"))
        return
    show_json(
        {"subject": record.subject, "version": record.version, "id": record.id, "type": record.schema_type,
         "references": record.references, "deleted": record.deleted, "schema": record.schema}
    )  # fmt: skip


@schemas.command()
@click.argument("subject")
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@_TYPE
@_REFERENCES
@click.option("--normalize", is_flag=True, help="Sort the parts whose order has no meaning.")
@json_option
@click.pass_context
def register(ctx: click.Context, /, subject: str, file: str, normalize: bool, as_json: bool, **given: Any) -> None:
    """Register the schema in FILE as the next version of SUBJECT. An identical schema is not registered twice.

    The values of topic clicks belong to subject clicks-value, as in Kafka's serializers.
    """
    draft = _draft(file, **given)
    with open_store(ctx, create=True, background=False) as store:
        record = store.schemas.register(subject, draft, normalize=normalize)
    if as_json:
        show_json({"subject": record.subject, "version": record.version, "id": record.id})
    else:
        click.echo(f"{record.id}")
        say(f"{record.subject} version {record.version} has id {record.id}")


@schemas.command()
@click.argument("subject")
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option(
    "--version",
    metavar="VERSION",
    help="Compare with this version only.  [default: the versions that the level requires]",
)
@_TYPE
@_REFERENCES
@json_option
@click.pass_context
def check(ctx: click.Context, /, subject: str, file: str, version: str | None, as_json: bool, **given: Any) -> int:
    """Check whether the schema in FILE may follow those of SUBJECT; the exit status is 1 if it may not."""
    draft = _draft(file, **given)
    with open_store(ctx, read_only=True) as store:
        problems = store.schemas.check(subject, draft, version)
    if as_json:
        show_json({"subject": subject, "compatible": not problems, "problems": problems})
    else:
        for problem in problems:
            click.echo(problem)
        say(f"the schema {'is not' if problems else 'is'} compatible with {subject}")
    return EXIT_FAILED if problems else EXIT_DONE


@schemas.command()
@click.argument("subject")
@click.argument("version", required=False)
@click.option(
    "--permanent",
    is_flag=True,
    help="Delete permanently what was deleted softly before. Its values cannot be decoded afterwards.",
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@click.pass_context
def delete(ctx: click.Context, subject: str, version: str | None, permanent: bool, yes: bool) -> None:
    """Delete SUBJECT, or one VERSION of it, softly: lookups by id still find it."""
    what = subject if version is None else f"{subject} version {version}"
    with open_store(ctx, background=False) as store:
        if permanent and not yes:
            if not sys.stdin.isatty():
                raise click.UsageError("this deletes permanently; without a terminal, add --yes")
            click.confirm(f"Delete {what} permanently?", abort=True, err=True)
        if version is None:
            found = store.schemas.delete_subject(subject, permanent=permanent)
        else:
            found = [store.schemas.delete_version(subject, version, permanent=permanent)]
    say(f"deleted {subject}, versions {', '.join(map(str, found))}{' permanently' if permanent else ''}")


@schemas.command()
@click.argument("subject", required=False)
@click.option("--set", "level", metavar="LEVEL",
              help="NONE, BACKWARD, FORWARD, FULL, or one of the last three with _TRANSITIVE.")  # fmt: skip
@click.option("--reset", is_flag=True, help="Remove the level that was set.")
@click.pass_context
def compatibility(ctx: click.Context, subject: str | None, level: str | None, reset: bool) -> None:
    """Print or set the compatibility level of SUBJECT, or the global level."""
    if level is not None and reset:
        raise click.UsageError("--set and --reset exclude each other")
    changes = level is not None or reset
    with open_store(ctx, read_only=not changes, background=False) as store:
        registry = store.schemas
        if level is not None:
            registry.set_config(subject, {"compatibilityLevel": level})
        elif reset:
            registry.delete_config(subject)
        found = registry.config(subject, default_to_global=True)["compatibilityLevel"]
    click.echo(found)


def _draft(file: str, schema_type: str | None, references: tuple[str, ...]) -> Any:
    kind = schema_type.upper() if schema_type is not None else type_of_file(file)
    text = read_schema(file)
    with exit_at_once_on_signals():
        from segmentlog.schemas.parsed_schemas import Draft
        from segmentlog.schemas.registry_records import Reference

    found = []
    for reference in references:
        name, _, place = reference.partition("=")
        subject, _, version = place.rpartition(":")
        if not name or not subject or not version.lstrip("-").isdecimal():
            raise click.UsageError(f"-r {reference}: give it as NAME=SUBJECT:VERSION")
        found.append(Reference(name, subject, int(version)))
    return Draft(text, kind, tuple(found))
