"""The certificate that shuts everybody else out of a private Ray.

Ray looks at its token once a call has arrived, and one of its methods (``RaySyncer.StartSync``) ends the process before
that when it is called without headers. So Ray's servers ask for a certificate, too: without one, nothing is called.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from cluster.config.private_files import write_private

VALID = timedelta(days=3650)
CLOCK_MARGIN = timedelta(days=1)


def certificate_environment(folder: Path) -> dict[str, str]:
    """Make a certificate with its key in ``folder``; what lets Ray's processes use it on both ends of a connection.

    It is its own authority, so it is the only one that is taken, and it is as secret as its key, which only this user
    can read.
    """
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    private_key = ec.generate_private_key(ec.SECP256R1())
    write_private(key, private_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    write_private(certificate, _sign(private_key).public_bytes(Encoding.PEM))
    return {
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": str(certificate),
        "RAY_TLS_SERVER_KEY": str(key),
        "RAY_TLS_CA_CERT": str(certificate),
    }


def _sign(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "baton")])
    here = [x509.DNSName("localhost"), *(x509.IPAddress(ip_address(text)) for text in ("127.0.0.1", "::1"))]
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_MARGIN)
        .not_valid_after(now + VALID)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectAlternativeName(here), critical=False)
        .sign(key, SHA256())
    )
