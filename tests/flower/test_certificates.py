"""Certificates for tests: names, validity and requirements."""

import datetime
import ipaddress
import ssl
import stat
import sys
from pathlib import Path

import pytest
from cryptography import x509

from fedshift.flower.testing import Deployment
from fedshift.flower.testing.certificates import server_certificate


def test_a_server_certificate_is_for_this_machine_and_two_days(tmp_path: Path) -> None:
    tls = server_certificate(tmp_path / "keys")
    certificate = x509.load_pem_x509_certificate(tls.certificate.read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost"]
    assert names.get_values_for_type(x509.IPAddress) == [ipaddress.ip_address("127.0.0.1")]
    now = datetime.datetime.now(datetime.UTC)
    assert certificate.not_valid_before_utc < now < certificate.not_valid_after_utc < now + datetime.timedelta(days=3)
    assert stat.S_IMODE(tls.key.stat().st_mode) == 0o600


def handshake(ca: Path, certificate: Path, key: Path, name: str) -> None:
    """TLS handshake in memory; ssl.SSLError if the client does not trust the server."""
    client_context, server_context = ssl.create_default_context(cafile=ca), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(certificate, key)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client, server = (
        client_context.wrap_bio(down, up, server_hostname=name),
        server_context.wrap_bio(up, down, server_side=True),
    )
    waiting = [client, server]
    while waiting:
        end = waiting.pop(0)
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            waiting.append(end)


def test_a_server_is_trusted_by_its_own_authority_under_its_own_names_only(tmp_path: Path) -> None:
    tls, other = server_certificate(tmp_path / "keys"), server_certificate(tmp_path / "foreign")
    for name in ("127.0.0.1", "localhost"):
        handshake(tls.ca, tls.certificate, tls.key, name)
    for ca, name in ((other.ca, "localhost"), (tls.ca, "example.org")):
        with pytest.raises(ssl.SSLCertVerificationError):
            handshake(ca, tls.certificate, tls.key, name)


def test_without_trustme_an_error_names_it_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "trustme", None)
    message = r"fedshift\.flower\.testing: a server certificate needs trustme: pip install 'trustme>=1\.2'"
    with pytest.raises(ImportError, match=message):
        Deployment(tmp_path / "test", [{"partition-id": 0}])
    assert not (tmp_path / "test").exists()
