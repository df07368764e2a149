"""Errors of the schema registry, with the codes of Confluent's: the first three digits are the HTTP status."""

from __future__ import annotations

from typing import ClassVar

from segmentlog.errors import SegmentlogError


class SchemaError(SegmentlogError):
    """An operation that the registry refused. ``code`` is the error code of Confluent's API."""

    code: ClassVar[int] = 50001
    text: ClassVar[str] = "{0}"
    """Format of the message, filled with the arguments."""

    def __str__(self) -> str:
        return self.text.format(*self.args)


class UnknownSubject(SchemaError, LookupError):
    """(subject) The subject has no versions, or all of them were deleted."""

    code = 40401
    text = "Subject '{0}' not found."


class UnknownVersion(SchemaError, LookupError):
    """(version) The subject has no such version."""

    code = 40402
    text = "Version {0} not found."


class UnknownSchema(SchemaError, LookupError):
    """(id) No schema has this id."""

    code = 40403
    text = "Schema {0} not found"


class SchemaNotRegistered(SchemaError, LookupError):
    """(subject) The subject has no version with this schema."""

    code = 40403
    text = "Schema not found"


class SubjectSoftDeleted(SchemaError):
    """(subject) The subject is soft-deleted already; ``permanent`` deletes it permanently."""

    code = 40404
    text = "Subject '{0}' was soft deleted. Set permanent=true to delete permanently"


class SubjectNotSoftDeleted(SchemaError):
    """(subject) A subject must be soft-deleted before it can be deleted permanently."""

    code = 40405
    text = "Subject '{0}' was not deleted first before being permanently deleted"


class VersionSoftDeleted(SchemaError):
    """(subject, version) The version is soft-deleted already; ``permanent`` deletes it permanently."""

    code = 40406
    text = "Subject '{0}' Version {1} was soft deleted. Set permanent=true to delete permanently"


class VersionNotSoftDeleted(SchemaError):
    """(subject, version) A version must be soft-deleted before it can be deleted permanently."""

    code = 40407
    text = "Subject '{0}' Version {1} was not deleted first before being permanently deleted"


class NoSubjectConfig(SchemaError, LookupError):
    """(subject) The subject has no configuration of its own."""

    code = 40408
    text = "Subject '{0}' does not have subject-level compatibility configured"


class NoSubjectMode(SchemaError, LookupError):
    """(subject) The subject has no mode of its own."""

    code = 40409
    text = "Subject '{0}' does not have subject-level mode configured"


class IncompatibleSchema(SchemaError, ValueError):
    """(subject, problems) The schema violates the subject's compatibility level; it was not registered."""

    code = 40901
    text = 'Schema being registered is incompatible with an earlier schema for subject "{0}", details: {1}'

    def __str__(self) -> str:
        return self.text.format(self.args[0], f"[{', '.join(self.args[1])}]")


def registration_problem(error: Exception, *, may_see: bool) -> str:
    """Return the message for a client whose schema was not registered.

    ``may_see`` is whether the client may read schemas: the details of an incompatibility quote the registered schema.
    """
    if isinstance(error, IncompatibleSchema) and not may_see:
        subject = error.args[0]
        return f'Schema being registered is incompatible with an earlier schema for subject "{subject}"'
    return str(error)


class InvalidSchema(SchemaError, ValueError):
    """(why) The text is not a valid schema of its type, or it refers to a missing schema."""

    code = 42201


class InvalidSchemaVersion(SchemaError, ValueError):
    """(version) The value is neither a version number nor ``latest``."""

    code = 42202
    text = (
        "The specified version '{0}' is not a valid version id. Allowed values are between [1, 2^31-1]"
        ' and the string "latest"'
    )


class InvalidCompatibility(SchemaError, ValueError):
    """(level) The value is not a compatibility level."""

    code = 42203
    text = (
        "Invalid compatibility level {0!r}. Valid values are none, backward, forward, full, backward_transitive,"
        " forward_transitive, and full_transitive"
    )


class InvalidRegistryMode(SchemaError, ValueError):
    """(mode) The value is not a registry mode."""

    code = 42204
    text = "Invalid mode {0!r}. Valid values are READWRITE, READONLY, READONLY_OVERRIDE, IMPORT"


class NotPermitted(SchemaError):
    """(why) The subject's mode, or the configuration of topic ``_schemas``, forbids the operation."""

    code = 42205


class ReferenceExists(SchemaError):
    """(subject, version) Other schemas refer to the version, so it was not deleted."""

    code = 42206
    text = "One or more references exist to the schema {{subject={0},version={1}}}."


class IdDoesNotMatch(SchemaError, ValueError):
    """(why) The id of an imported schema already belongs to another schema."""

    code = 42207


class InvalidSubject(SchemaError, ValueError):
    """(subject) The value is not a valid subject name."""

    code = 42208
    text = "The specified subject '{0}' is not a valid subject."


class SchemaTooLarge(SchemaError, ValueError):
    """(why) The schema is larger than the largest record of topic ``_schemas``."""

    code = 42209


class MissingPackage(SchemaError, ImportError):
    """(package, purpose) The package that reads this type of schema is not installed."""

    text = "{1} needs the package {0}: pip install '.[http]' in a clone of segmentlog"


class InvalidPayload(SchemaError, ValueError):
    """(why) The bytes do not start with magic byte and schema id, or the value violates its schema."""

    code = 42201


class RegistryUnavailable(SchemaError):
    """(url, why) A registry did not answer over HTTP, or its answer is malformed."""

    text = "{0}: {1}"


class RemoteError(SchemaError):
    """(url, code, message) A registry refused a request over HTTP."""

    text = "{0}: {2} ({1})"
