"""The TLS certificate that keeps other users out of a private Ray.

Ray checks its token only after a call has arrived. One of its methods (``RaySyncer.StartSync``) crashes the process
before that check when it is called without headers. So Ray's servers require a client certificate, too: without one, no
method can be called.
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
    """Make a certificate and its key in ``folder``. Returns the environment with which Ray uses it on both sides.

    The certificate is self-signed and its own authority, so no other certificate is accepted. Only this user can read
    its key.
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
