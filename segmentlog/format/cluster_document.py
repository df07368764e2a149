"""The cluster document: which machine leads the store of a cluster, and which machines are in sync with it.

    cluster.json   about 1 KB; the only object of a cluster that changes, and only by conditional puts

It is JSON with a checksum (`format.checksummed_json`). The keys are the field names of `ClusterDocument`. Its size does
not depend on the number of topics.

Versions. `LEVEL` is the newest level that this release reads and writes. A release that changes the format, or adds a
key, adds a level. It writes the new level only after all machines run a release that reads it. The document names the
oldest such release, so that an older one can refuse the document and print what is needed. Within a level an unknown
key is refused: a release that preserved keys without understanding them would change the ISR against their meaning.
The form of the checksum and the keys ``level`` and ``min_release`` are the same at every level.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec
from msgspec.structs import replace

from segmentlog.format.checksummed_json import ChecksumMismatch, add_checksum, remove_checksum

CLUSTER_KEY: Final = "cluster.json"
LEVELS: Final = {1: "0.1.0"}
"""The levels that this release reads, and for each the oldest release that reads it."""
LEVEL: Final = max(LEVELS)
MAX_DOCUMENT_BYTES: Final = 64 << 10
"""A hundred machines have about 16 KiB."""
MAX_TERM: Final = 2**31 - 1
"""Terms are the leader epochs of Kafka's protocol: 32 bits."""
_MAX_VERSION: Final = 2**63 - 1
_MAX_WORKERS: Final = 10_000
_MAX_RACK_CHARACTERS: Final = 255
_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_ADDRESS: Final = re.compile(
    r"(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}(?:%[A-Za-z0-9._-]{1,15})?\]):([0-9]{1,5})"
)
_MAX_PORT: Final = 65535
_RELEASE: Final = re.compile(r"[0-9][0-9A-Za-z.+-]{0,31}")


class MalformedDocument(ValueError):
    """The bytes are not a cluster document that this release can read or write."""


class NewerDocument(MalformedDocument):
    """The document has a level that this release cannot read. ``release`` can, or is "" if the document names none."""

    def __init__(self, level: int, release: str) -> None:
        super().__init__(level, release)
        self.level, self.release = level, release

    def __str__(self) -> str:
        needed = f"segmentlog {self.release} or newer" if self.release else "the release that wrote it"
        return (
            f"the cluster document has level {self.level}, but this release of segmentlog reads levels up to {LEVEL};"
            f" upgrade this machine to {needed}"
        )


class InSyncReplica(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A member of the ISR: a machine, and the incarnation in which it joined."""

    machine: str
    incarnation: str


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A machine of the cluster, as it last described itself."""

    address: str
    """HOST:PORT of its first worker, as other machines reach it. An IPv6 address is in brackets."""
    workers: int
    """Number of worker processes."""
    incarnation: str
    """Random text. A machine draws a new incarnation whenever data that it confirmed may be gone."""
    rack: str = ""
    """Kafka's ``broker.rack``."""


class ClusterDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of ``cluster.json``. A `Coordinator` sets ``version`` and ``nonce``."""

    cluster_id: str
    store_id: str
    term: int
    """Number of leaderships. It is the epoch of the batches that this leader appends."""
    leader: str | None
    """Id of the leading machine, a member of the ISR. It is None before the first leader."""
    isr: tuple[InSyncReplica, ...]
    """In-sync replicas. A machine that is down, or has a newer incarnation, may remain a member, but cannot lead."""
    min_isr: int
    """The high watermark rises only while the ISR has at least this number of members."""
    machines: dict[str, Machine]
    """All machines, by id."""
    forced_term: int | None = None
    """The latest term that a person forced (``cluster lead --lose``).

    A follower whose high watermark is from an earlier term may truncate below it.
    """
    version: int = 0
    """One more with every swap, from 1 on."""
    nonce: str = ""
    """New for every attempted swap, so that the writer of a document can be identified."""
    level: int = LEVEL
    """The format of the document."""
    min_release: str = LEVELS[LEVEL]
    """The oldest release that reads this level. `encode_document` sets it."""

    @property
    def is_forced(self) -> bool:
        """Whether a person forced the current term."""
        return self.forced_term == self.term


class _Level(msgspec.Struct):
    level: int
    min_release: str = ""


_decoder = msgspec.json.Decoder(ClusterDocument)
_level_decoder = msgspec.json.Decoder(_Level)


def encode_document(document: ClusterDocument) -> bytes:
    """Return the bytes of ``cluster.json``. Raise `MalformedDocument` if the document contradicts itself."""
    if wrong := _contradiction(document):
        raise MalformedDocument(f"the cluster document contradicts itself: {wrong}")
    data = add_checksum(msgspec.json.encode(replace(document, min_release=LEVELS[document.level])))
    if len(data) > MAX_DOCUMENT_BYTES:
        raise MalformedDocument(f"the cluster document has {len(data):,} bytes, and at most {MAX_DOCUMENT_BYTES:,} fit")
    return data


def decode_document(data: bytes) -> ClusterDocument:
    """Decode ``cluster.json``, and check that it is consistent. Raise `MalformedDocument`, or `NewerDocument`."""
    if len(data) > MAX_DOCUMENT_BYTES:
        raise MalformedDocument(f"the cluster document has {len(data):,} bytes, and at most {MAX_DOCUMENT_BYTES:,} fit")
    try:
        text = remove_checksum(data)
        found = _level_decoder.decode(text)
        if found.level > LEVEL:
            raise NewerDocument(found.level, found.min_release if _RELEASE.fullmatch(found.min_release) else "")
        document = _decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ChecksumMismatch) as error:
        raise MalformedDocument(f"the cluster document is damaged: {error}") from None
    # One document has one text. This refuses repeated keys, of which another reader could use another one.
    if encode_document(document) != data:
        raise MalformedDocument("the cluster document was not written by segmentlog: a key is repeated or out of order")
    return document


def _contradiction(document: ClusterDocument) -> str:
    """Return a description of what is wrong with the document; "" if it is valid."""
    if document.level not in LEVELS:
        return f"its level is {document.level}"
    for what in ("cluster_id", "store_id", "nonce"):
        if not _ID.fullmatch(getattr(document, what)):
            return f"its {what} is {getattr(document, what)[:100]!r}"
    if not 1 <= document.version <= _MAX_VERSION:
        return f"its version is {document.version}"
    if not 0 <= document.term <= MAX_TERM:
        return f"its term is {document.term}"
    if document.forced_term is not None and not 0 <= document.forced_term <= document.term:
        return f"term {document.forced_term} was forced, but the current term is {document.term}"
    for machine_id, machine in document.machines.items():
        if wrong := _contradiction_of_machine(machine_id, machine):
            return wrong
    if not 1 <= document.min_isr <= len(document.machines):
        return f"min_isr is {document.min_isr}, but the cluster has {len(document.machines)} machines"
    return _contradiction_of_isr(document)


def _contradiction_of_isr(document: ClusterDocument) -> str:
    members = [member.machine for member in document.isr]
    if not members:
        return "its ISR is empty"
    if unknown := [member for member in members if member not in document.machines]:
        return f"the ISR has the machine {unknown[0][:100]!r}, which the cluster does not have"
    if len(set(members)) < len(members):
        return f"the ISR lists a machine twice: {', '.join(members)[:200]}"
    if wrong := [member.incarnation for member in document.isr if not _ID.fullmatch(member.incarnation)]:
        return f"an incarnation in the ISR is {wrong[0][:100]!r}"
    if document.leader is not None and document.leader not in members:
        return f"the leader {document.leader[:100]!r} is not in the ISR"
    return ""


def _contradiction_of_machine(machine_id: str, machine: Machine) -> str:
    if not _ID.fullmatch(machine_id):
        return f"the id of a machine is {machine_id[:100]!r}"
    port = _ADDRESS.fullmatch(machine.address)
    if port is None or not 1 <= int(port[1]) <= _MAX_PORT:
        return f"the address of machine {machine_id} is {machine.address[:100]!r}, not HOST:PORT"
    if not 1 <= machine.workers <= _MAX_WORKERS:
        return f"machine {machine_id} has {machine.workers} workers"
    if not _ID.fullmatch(machine.incarnation):
        return f"the incarnation of machine {machine_id} is {machine.incarnation[:100]!r}"
    if len(machine.rack) > _MAX_RACK_CHARACTERS or not machine.rack.isprintable():
        return f"the rack of machine {machine_id} is {machine.rack[:100]!r}"
    return ""
