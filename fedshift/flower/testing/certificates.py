"""Keys and certificates for tests: a certificate authority, a server on this machine, and SuperNodes."""

import datetime
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from fedshift.core.extras import needs
from fedshift.flower.app.superlink import Tls

VALID = datetime.timedelta(days=2)  # before and after now: clocks may differ; too short for other uses


@dataclass(frozen=True)
class Key:
    """P-384 key in OpenSSH format, by which a SuperNode authenticates itself."""

    private: Path
    public: Path


def server_certificate(folder: Path) -> Tls:
    """Create a certificate authority and a certificate for 127.0.0.1 and localhost; ImportError without trustme."""
    try:
        import trustme
    except ImportError:
        raise ImportError(f"fedshift.flower.testing: a server certificate {needs('trustme')}") from None
    folder.mkdir(parents=True, exist_ok=True)
    authority, now = trustme.CA(), datetime.datetime.now(datetime.UTC)
    issued = authority.issue_cert("127.0.0.1", "localhost", not_before=now - VALID, not_after=now + VALID)
    tls = Tls(folder / "ca.crt", folder / "server.pem", folder / "server.key")
    authority.cert_pem.write_to_path(tls.ca)
    issued.cert_chain_pems[0].write_to_path(tls.certificate)
    _write_secret(tls.key, issued.private_key_pem.bytes())
    return tls


def supernode_key(folder: Path, name: str) -> Key:
    """Create folder/NAME and folder/NAME.pub, like `ssh-keygen -t ecdsa -b 384`."""
    folder.mkdir(parents=True, exist_ok=True)
    key, files = ec.generate_private_key(ec.SECP384R1()), Key(folder / name, folder / f"{name}.pub")
    _write_secret(files.private, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    files.public.write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    return files


def _write_secret(path: Path, content: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(content)
