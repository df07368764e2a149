"""The name in a certificate, spelled as Kafka spells it."""

from __future__ import annotations

import pytest
from cryptography.x509 import Name
from cryptography.x509.name import _ASN1Type
from cryptography.x509.oid import NameOID
from security.certificates import certificate_for, subject

from segmentlog.security.distinguished_names import name_of, subject_of

# Recorded with Java 25: an encoded X500Principal, and its getName().
GOLDEN = [
    (
        "3059310b3009060355040613024445310b3009060355040813024257310c300a06035504071303556c6d31133011060355040a130a41636d652c"
        "20496e632e310c300a060355040b1303456e67310c300a06035504031303616e6e",
        r"CN=ann,OU=Eng,O=Acme\, Inc.,L=Ulm,ST=BW,C=DE",
    ),
    ("300d310b300906035504030c022378", r"CN=\#x"),
    ("301c311a301806035504030c11613d622b633c643e653b66236722685c69", r"CN=a\=b\+c\<d\>e\;f\#g\"h\\i"),
    (
        "305c310a300806035504091301783111300f060a0992268993f22c64010113013131133011060a0992268993f22c64011916036f726731173015"
        "060a0992268993f22c64011916076578616d706c65310d300b06035504030c045a6fc3ab",
        "CN=Zoë,DC=example,DC=org,UID=1,STREET=x",
    ),
    (
        "303c310b3009060355040c13024472310b3009060355040513023132310a300806035504031301783114301206092a864886f70d0109011605"
        "6140622e63",
        "1.2.840.113549.1.9.1=#16056140622e63,CN=x,2.5.4.5=#13023132,2.5.4.12=#13024472",
    ),
    ("3022310a3008060355040a1301633114300806035504031301613008060355040b130162", "CN=a+OU=b,O=c"),
    ("3017311530130603550403130c6d756c746920207370616365", "CN=multi  space"),
    ("30133111300f06035504030c086e65770a6c696e65", "CN=new\nline"),
    ("300b3109300706035504031300", "CN="),
    ("300e310c300a06035504030c0365cc81", "CN=e\u0301"),
]  # fmt: skip


@pytest.mark.parametrize(("der", "expected"), GOLDEN)
def test_names_are_those_of_java(der: str, expected: str) -> None:
    """Order, keywords, what has none, escapes, several attributes in one part."""
    data = bytes.fromhex(der)
    assert data[0] == 0x30
    assert name_of(data[2:]) == expected


def test_the_subject_of_a_certificate_is_found() -> None:
    """Behind its version, its serial number and its issuer; strings of every type."""
    name = subject(
        (NameOID.COUNTRY_NAME, "DE", None),
        (NameOID.ORGANIZATION_NAME, "Ä & Ö", _ASN1Type.BMPString),
        (NameOID.ORGANIZATIONAL_UNIT_NAME, "x", _ASN1Type.T61String),
        (NameOID.COMMON_NAME, "Zoë", _ASN1Type.UTF8String),
    )
    assert subject_of(certificate_for(name)) == "CN=Zoë,OU=x,O=Ä & Ö,C=DE"


@pytest.mark.filterwarnings("ignore:Attribute's length")
def test_a_long_name_and_one_of_spaces() -> None:
    """Lengths of more than one byte; spaces at either end are kept by a backslash."""
    assert subject_of(certificate_for(subject((NameOID.COMMON_NAME, "x" * 300, None)))) == "CN=" + "x" * 300
    found = subject_of(certificate_for(subject((NameOID.COMMON_NAME, "  a b ", _ASN1Type.UTF8String))))
    assert found == "CN=\\ \\ a b\\ "
    assert subject_of(certificate_for(subject((NameOID.COMMON_NAME, "  ", _ASN1Type.UTF8String)))) == "CN=\\ \\ "


def test_a_string_of_another_type_than_it_says_is_written_in_hex() -> None:
    """A malformed string is written in hex and keeps the connection: authorities sign such certificates."""
    latin = bytes.fromhex("310c300a060355040a130352e978")
    assert name_of(latin) == "O=#130352e978"
    assert name_of(bytes.fromhex("310c300a06035504030c03616e6e") + latin) == "O=#130352e978,CN=ann"


def test_nobody_has_an_empty_name() -> None:
    """A certificate without a subject, which only has alternative names."""
    assert subject_of(certificate_for(Name([]))) == ""


def test_no_certificate_is_an_error_wherever_it_is_cut() -> None:
    """A cut anywhere raises ValueError, and no other error."""
    whole = certificate_for(subject((NameOID.COMMON_NAME, "ann", None)))
    for size in range(len(whole)):
        with pytest.raises(ValueError, match="certificate"):
            subject_of(whole[:size])
