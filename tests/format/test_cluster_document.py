"""The cluster document: what is written is read, and anything else is refused with what is wrong."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from segmentlog.format.checksummed_json import add_checksum, remove_checksum
from segmentlog.format.cluster_document import (
    LEVEL,
    LEVELS,
    MAX_DOCUMENT_BYTES,
    MAX_TERM,
    ClusterDocument,
    InSyncReplica,
    Machine,
    MalformedDocument,
    NewerDocument,
    decode_document,
    encode_document,
)

MACHINES = {
    "m1": Machine("10.0.0.1:9092", 4, "0a1b", "rack 1"),
    "m2": Machine("[fe80::1%eth0]:9092", 1, "2c3d"),
    "m3": Machine("host.example:65535", 16, "4e5f", "Gestell ä"),
}
DOCUMENT = ClusterDocument(
    cluster_id="Xk3-pQ_9",
    store_id="5" * 32,
    term=7,
    leader="m2",
    isr=(InSyncReplica("m2", "2c3d"), InSyncReplica("m1", "older")),
    min_isr=2,
    machines=MACHINES,
    forced_term=3,
    version=12,
    nonce="0123456789ab",
)


def changed(**fields: Any) -> bytes:
    """Return the bytes of the document with other values of some keys, and a checksum that matches."""
    content = msgspec.json.decode(remove_checksum(encode_document(DOCUMENT)))
    return add_checksum(msgspec.json.encode(content | fields))


def with_machine(**fields: Any) -> dict[str, Any]:
    """Return the machines, the first with other values of some keys."""
    machines = msgspec.to_builtins(MACHINES)
    machines["m1"] |= fields
    return {"machines": machines}


def test_a_document_survives_the_round_trip() -> None:
    """All fields return; a text that differs only in its spelling is refused."""
    data = encode_document(DOCUMENT)
    assert decode_document(data) == DOCUMENT
    assert len(data) < 1024
    assert not DOCUMENT.is_forced
    assert replace(DOCUMENT, forced_term=7).is_forced
    first = replace(DOCUMENT, leader=None, term=0, forced_term=None, isr=DOCUMENT.isr[:1], min_isr=3)
    assert decode_document(encode_document(first)) == first, "an ISR below min_isr is valid: it only confirms nothing"
    text = remove_checksum(data)
    for respelled in (
        text.replace(b'"term":7', b'"term": 7'),
        text.replace(b'"term":7', b'"term":6,"term":7'),
        text.replace(b'"m1":', b'"m1":{"address":"h:1","workers":1,"incarnation":"x","rack":""},"m1":', 1),
        text.replace(b'"rack":""', b'"rack":"","rack":""'),
        text + b" ",
    ):
        with pytest.raises(MalformedDocument, match="repeated or out of order"):
            decode_document(add_checksum(respelled))


IN_ISR = {"machine": "m1", "incarnation": "x"}
HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "a leader outside the ISR": ({"leader": "m3"}, "leader 'm3' is not in the ISR"),
    "an unknown leader": ({"leader": "m9"}, "leader 'm9' is not in the ISR"),
    "an empty ISR": ({"isr": [], "leader": None}, "ISR is empty"),
    "an unknown member": ({"isr": [IN_ISR | {"machine": "m9"}]}, "'m9', which the cluster does not have"),
    "a member twice": ({"isr": [IN_ISR, IN_ISR | {"incarnation": "y"}]}, "twice: m1, m1"),
    "a member with a strange incarnation": ({"isr": [IN_ISR | {"incarnation": ""}]}, "incarnation in the ISR is ''"),
    "min_isr above the machines": ({"min_isr": 4}, "min_isr is 4, but the cluster has 3 machines"),
    "min_isr of none": ({"min_isr": 0}, "min_isr is 0"),
    "no machine": ({"machines": {}}, "has 0 machines"),
    "a negative term": ({"term": -1, "forced_term": None}, "term is -1"),
    "a term of more than 32 bits": ({"term": MAX_TERM + 1}, f"term is {MAX_TERM + 1}"),
    "a term of 100 bits": ({"term": 10**30}, f"term is {10**30}"),
    "a forced term to come": ({"forced_term": 8}, "term 8 was forced, but the current term is 7"),
    "version 0": ({"version": 0}, "version is 0"),
    "no nonce": ({"nonce": ""}, "nonce is ''"),
    "a path as cluster id": ({"cluster_id": "../x"}, "cluster_id is"),
    "no store id": ({"store_id": ""}, "store_id is"),
    "a strange machine id": ({"machines": {"a b": msgspec.to_builtins(MACHINES["m1"])}}, "id of a machine is 'a b'"),
    "level 0": ({"level": 0}, "level is 0"),
    "an unknown key": ({"color": "red"}, "damaged.*color"),
    "an unknown key of a machine": (with_machine(color="red"), "damaged.*color"),
    "a term that is a text": ({"term": "7"}, "damaged"),
    "a term that is a fraction": ({"term": 7.5}, "damaged"),
    "an ISR of texts": ({"isr": ["m1"]}, "damaged"),
    "no workers": (with_machine(workers=0), "machine m1 has 0 workers"),
    "a rack of two lines": (with_machine(rack="a\nb"), "rack of machine m1"),
    "a long rack": (with_machine(rack="a" * 256), "rack of machine m1"),
    "an empty incarnation": (with_machine(incarnation=""), "incarnation of machine m1"),
    "another release for this level": ({"min_release": "9.9"}, "was not written by segmentlog"),
    **{
        f"the address {address!r}": (with_machine(address=address), "address of machine m1")
        for address in (
            "", ":9092", "host", "host:", "host:0", "host:65536", "host:x", "a b:1", "::1:9092", "[::1]", "h\n:1",
            "[h]:1", "user@host:1", "host:1/path", "http://host:1", f"{'h' * 254}:1", "h:\N{ARABIC-INDIC DIGIT ONE}",
        )
    },
}  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), HOSTILE.values(), ids=HOSTILE)
def test_a_contradictory_document_is_refused(fields: dict[str, Any], message: str) -> None:
    """The checksum is right, and the message names what is wrong."""
    with pytest.raises(MalformedDocument, match=message) as caught:
        decode_document(changed(**fields))
    assert type(caught.value) is MalformedDocument
    assert len(str(caught.value)) < 400


def test_a_contradictory_document_is_not_written() -> None:
    """A mistake of the program does not reach the object store."""
    for wrong in (replace(DOCUMENT, leader="m3"), replace(DOCUMENT, nonce=""), replace(DOCUMENT, level=LEVEL + 1)):
        with pytest.raises(MalformedDocument, match="contradicts itself"):
            encode_document(wrong)
    machines = {f"m{number}": Machine("h" * 200 + ":1", 1, "x" * 64, "r" * 255) for number in range(200)}
    with pytest.raises(MalformedDocument, match="at most 65,536 fit"):
        encode_document(replace(DOCUMENT, machines=DOCUMENT.machines | machines))


def test_a_newer_level_names_the_release_that_reads_it() -> None:
    """The error names the release, whatever else the document has, but never repeats a name that is not a release."""
    for named, needed in (("2.3.0", "segmentlog 2.3.0 or newer"), ("rm -rf\n", "the release that wrote it")):
        with pytest.raises(NewerDocument, match=needed) as caught:
            decode_document(changed(level=LEVEL + 1, min_release=named, machines="moved", color=1))
        assert caught.value.level == LEVEL + 1
        assert f"reads levels up to {LEVEL}" in str(caught.value)
    assert replace(DOCUMENT, level=1).min_release == LEVELS[1]


@pytest.mark.parametrize("data", [b"", b"{}", b"null", b"[" * 100_000, b"\xff" * 50, add_checksum(b"{" * 5000)])
def test_what_is_no_document_is_refused(data: bytes) -> None:
    """A text that is empty, too deep, too large or not JSON is refused."""
    with pytest.raises(MalformedDocument, match=r"damaged|at most"):
        decode_document(data)


def test_a_huge_document_is_refused_unread() -> None:
    """This also holds for valid JSON with a right checksum."""
    with pytest.raises(MalformedDocument, match=f"at most {MAX_DOCUMENT_BYTES:,} fit"):
        decode_document(changed(cluster_id="x" * MAX_DOCUMENT_BYTES))


# ---------------------------------------------------------------- any document, any damage

ids = st.text("abcXYZ019._-", min_size=1, max_size=64)
machines_of = st.builds(
    Machine,
    st.builds("{}:{}".format, st.sampled_from(["h", "10.0.0.1", "[::1]"]), st.integers(1, 65535)),
    st.integers(1, 10_000),
    ids,
    st.text(max_size=20).filter(str.isprintable),
)


@st.composite
def documents(draw: st.DrawFn) -> ClusterDocument:
    """Return any valid document."""
    machines = draw(st.dictionaries(ids, machines_of, min_size=1, max_size=5))
    members = draw(st.lists(st.sampled_from(sorted(machines)), min_size=1, unique=True))
    term = draw(st.integers(0, MAX_TERM))
    return ClusterDocument(
        cluster_id=draw(ids),
        store_id=draw(ids),
        term=term,
        leader=draw(st.none() | st.sampled_from(members)),
        isr=tuple(InSyncReplica(member, draw(ids)) for member in members),
        min_isr=draw(st.integers(1, len(machines))),
        machines=machines,
        forced_term=draw(st.none() | st.integers(0, term)),
        version=draw(st.integers(1, 2**63 - 1)),
        nonce=draw(ids),
    )


@given(documents())
def test_any_document_survives_the_round_trip(document: ClusterDocument) -> None:
    """Any decoded document equals the encoded one, and encodes to the same bytes."""
    data = encode_document(document)
    assert decode_document(data) == document
    assert encode_document(decode_document(data)) == data


@given(documents(), st.data())
def test_any_damage_is_refused(document: ClusterDocument, data: st.DataObject) -> None:
    """Bytes changed, removed, repeated or inserted: `MalformedDocument` and nothing else."""
    whole = encode_document(document)
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, min(start + 40, len(whole))))
    damaged = whole[:start] + data.draw(st.binary(max_size=40) | st.just(whole[start:end] * 2)) + whole[end:]
    if damaged != whole:
        with pytest.raises(MalformedDocument, match="damaged"):
            decode_document(damaged)


@given(documents(), st.data())
def test_any_text_with_a_right_checksum_is_read_or_refused(document: ClusterDocument, data: st.DataObject) -> None:
    """With a computed checksum, damaged text is refused or decodes to a document that encodes to the same text."""
    text = remove_checksum(encode_document(document))
    start = data.draw(st.integers(1, len(text)))
    end = data.draw(st.integers(start, min(start + 10, len(text))))
    forged = add_checksum(text[:start] + data.draw(st.binary(max_size=10) | st.just(text[start:end] * 2)) + text[end:])
    try:
        found = decode_document(forged)
    except MalformedDocument:
        return
    assert encode_document(found) == forged


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(ClusterDocument.__struct_fields__), json_values)
def test_any_value_of_a_key_is_read_or_refused(key: str, value: object) -> None:
    """With a matching checksum, the decoded document has this value, or the error is MalformedDocument."""
    try:
        found = decode_document(changed(**{key: value}))
    except MalformedDocument:
        return
    assert msgspec.to_builtins(found)[key] == value
