"""Keys and certificates for tests: a certificate authority, a server on this machine, and SuperNodes."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import NameOID

from fedshift.flower.app.superlink import Tls

VALID = datetime.timedelta(days=2)  # long enough for a test, too short to be of use elsewhere


@dataclass(frozen=True)
class Key:
    """An EC key on P-384 in OpenSSH form, as SuperNodes prove with who they are."""

    private: Path
    public: Path


def server_certificate(folder: Path) -> Tls:
    """A new authority, and a certificate of it for 127.0.0.1 and localhost."""
    folder.mkdir(parents=True, exist_ok=True)
    authority, server = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    ca = (
        _certificate("fedshift tests", "fedshift tests", authority.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.KeyUsage(True, False, False, False, False, True, True, False, False), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA384())
    )
    names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
    certificate = (
        _certificate("localhost", "fedshift tests", server.public_key())
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA384())
    )
    tls = Tls(folder / "ca.crt", folder / "server.pem", folder / "server.key")
    tls.ca.write_bytes(ca.public_bytes(Encoding.PEM))
    tls.certificate.write_bytes(certificate.public_bytes(Encoding.PEM))
    _write_secret(tls.key, server.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return tls


def supernode_key(folder: Path, name: str) -> Key:
    """folder/NAME and folder/NAME.pub, as `ssh-keygen -t ecdsa -b 384` makes them."""
    folder.mkdir(parents=True, exist_ok=True)
    key, files = ec.generate_private_key(ec.SECP384R1()), Key(folder / name, folder / f"{name}.pub")
    _write_secret(files.private, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    files.public.write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    return files


def _certificate(subject: str, issuer: str, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(name(subject))
        .issuer_name(name(issuer))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - VALID)  # clocks differ
        .not_valid_after(now + VALID)
    )


def _write_secret(path: Path, content: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(content)
