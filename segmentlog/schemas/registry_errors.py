"""What a schema registry answers instead. Codes are those of Confluent's: the first three digits are HTTP's."""

from __future__ import annotations

from typing import ClassVar

from segmentlog.errors import SegmentlogError


class SchemaError(SegmentlogError):
    """Something that the registry cannot do. ``code`` tells programs what, as in Confluent's API."""

    code: ClassVar[int] = 50001
    text: ClassVar[str] = "{0}"
    """What is said, of the arguments."""

    def __str__(self) -> str:
        return self.text.format(*self.args)


class UnknownSubject(SchemaError, LookupError):
    """(subject) Nothing was registered under it, or all of that was deleted."""

    code = 40401
    text = "Subject '{0}' not found."


class UnknownVersion(SchemaError, LookupError):
    """(version) The subject has no such version."""

    code = 40402
    text = "Version {0} not found."


class UnknownSchema(SchemaError, LookupError):
    """(id) There is none with this id."""

    code = 40403
    text = "Schema {0} not found"


class SchemaNotRegistered(SchemaError, LookupError):
    """(subject) Nothing like that schema is registered there."""

    code = 40403
    text = "Schema not found"


class SubjectSoftDeleted(SchemaError):
    """(subject) It was deleted before; what is left is to delete it for good."""

    code = 40404
    text = "Subject '{0}' was soft deleted. Set permanent=true to delete permanently"


class SubjectNotSoftDeleted(SchemaError):
    """(subject) Only what was deleted before is deleted for good."""

    code = 40405
    text = "Subject '{0}' was not deleted first before being permanently deleted"


class VersionSoftDeleted(SchemaError):
    """(subject, version) It was deleted before."""

    code = 40406
    text = "Subject '{0}' Version {1} was soft deleted. Set permanent=true to delete permanently"


class VersionNotSoftDeleted(SchemaError):
    """(subject, version) Only what was deleted before is deleted for good."""

    code = 40407
    text = "Subject '{0}' Version {1} was not deleted first before being permanently deleted"


class NoSubjectConfig(SchemaError, LookupError):
    """(subject) It has no configuration of its own."""

    code = 40408
    text = "Subject '{0}' does not have subject-level compatibility configured"


class NoSubjectMode(SchemaError, LookupError):
    """(subject) It has no mode of its own."""

    code = 40409
    text = "Subject '{0}' does not have subject-level mode configured"


class IncompatibleSchema(SchemaError, ValueError):
    """(subject, problems) The schema breaks what the subject's level promises; nothing was registered."""

    code = 40901
    text = 'Schema being registered is incompatible with an earlier schema for subject "{0}", details: {1}'

    def __str__(self) -> str:
        return self.text.format(self.args[0], f"[{', '.join(self.args[1])}]")


def registration_problem(error: Exception, *, may_see: bool) -> str:
    """Return what to tell a client whose schema is not registered; ``may_see``: whether it may read schemas.

    What breaks compatibility is described by parts of the registered schema.
    """
    if isinstance(error, IncompatibleSchema) and not may_see:
        subject = error.args[0]
        return f'Schema being registered is incompatible with an earlier schema for subject "{subject}"'
    return str(error)


class InvalidSchema(SchemaError, ValueError):
    """(why) A text that is no schema of its type, or that refers to one that is not there."""

    code = 42201


class InvalidSchemaVersion(SchemaError, ValueError):
    """(version) No number of a version, and not ``latest``."""

    code = 42202
    text = (
        "The specified version '{0}' is not a valid version id. Allowed values are between [1, 2^31-1]"
        ' and the string "latest"'
    )


class InvalidCompatibility(SchemaError, ValueError):
    """(level) No level of compatibility."""

    code = 42203
    text = (
        "Invalid compatibility level {0!r}. Valid values are none, backward, forward, full, backward_transitive,"
        " forward_transitive, and full_transitive"
    )


class InvalidRegistryMode(SchemaError, ValueError):
    """(mode) No mode of a registry."""

    code = 42204
    text = "Invalid mode {0!r}. Valid values are READWRITE, READONLY, READONLY_OVERRIDE, IMPORT"


class NotPermitted(SchemaError):
    """(why) What the mode of the subject does not allow, or the topic that holds the schemas."""

    code = 42205


class ReferenceExists(SchemaError):
    """(subject, version) Other schemas refer to what was to be deleted."""

    code = 42206
    text = "One or more references exist to the schema {{subject={0},version={1}}}."


class IdDoesNotMatch(SchemaError, ValueError):
    """(why) The id that a schema is to be imported under is another one's."""

    code = 42207


class InvalidSubject(SchemaError, ValueError):
    """(subject) A name that no subject has."""

    code = 42208
    text = "The specified subject '{0}' is not a valid subject."


class SchemaTooLarge(SchemaError, ValueError):
    """(why) No record of the topic holds it."""

    code = 42209


class MissingPackage(SchemaError, ImportError):
    """(package, what for) It reads this kind of schema, and is not installed."""

    text = "{1} needs the package {0}: pip install '.[http]' in a clone of segmentlog"


class InvalidPayload(SchemaError, ValueError):
    """(why) Bytes that no serializer has written, or a value that the schema does not describe."""

    code = 42201


class RegistryUnavailable(SchemaError):
    """(url, why) A registry that is asked over HTTP does not answer."""

    text = "{0}: {1}"


class RemoteError(SchemaError):
    """(url, code, message) What a registry that is asked over HTTP has answered instead."""

    text = "{0}: {2} ({1})"
