"""Makes what a federation needs to trust itself: an authority, a server's certificate, and keys of nodes.

    python credentials.py FOLDER HOST [HOST …] [--nodes 4]

The server's certificate is for the given names and addresses, and for 127.0.0.1, where a SuperLink's own
processes find it. Keep FOLDER/ca.key and FOLDER/server.key to yourself; every node gets ca.crt and its own
node-K.key, and nothing else. Public keys are registered with the server by `flwr supernode register`.
"""

import argparse
import ipaddress
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAYS = 365
LOOPBACK = "127.0.0.1"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("host", nargs="+")
    parser.add_argument("--nodes", type=int, default=4)
    given = parser.parse_args()
    make(given.folder, given.host, given.nodes)
    print(f"{given.folder}: ca.crt, server.pem, server.key, and node-0 to node-{given.nodes - 1}")


def make(folder: Path, hosts: list[str], nodes: int) -> None:
    """Writes all files; those that are there are left as they are, if they are for these hosts."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "ca.crt").exists():
        authority, server = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Federation's authority")])
        own = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0])])
        signed = _certificate(name, name, authority, authority, x509.BasicConstraints(True, 0), critical=True)
        names = dict.fromkeys([*hosts, LOOPBACK])
        known = x509.SubjectAlternativeName([_named(host) for host in names])
        certificate = _certificate(own, name, server, authority, known, critical=False)
        (folder / "ca.crt").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        (folder / "server.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        _write_key(folder / "ca.key", authority)
        _write_key(folder / "server.key", server)
    else:
        _check(folder / "server.pem", hosts)
    for k in range(nodes):
        if not (folder / f"node-{k}.key").exists():
            key = ec.generate_private_key(ec.SECP384R1())
            _write_key(folder / f"node-{k}.key", key, serialization.PrivateFormat.OpenSSH)
            public = key.public_key().public_bytes(
                serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
            )
            (folder / f"node-{k}.pub").write_bytes(public)


def _check(path: Path, hosts: list[str]) -> None:
    """Stops where a server's certificate is not for all of these hosts."""
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    known = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    missing = [host for host in hosts if _named(host) not in list(known)]
    if missing:
        raise SystemExit(f"{path} is there, and not for {', '.join(missing)}: give another folder")


def _named(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    extension: x509.ExtensionType,
    *,
    critical: bool,
) -> x509.Certificate:
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=DAYS))
        .add_extension(extension, critical=critical)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
    )
    if isinstance(extension, x509.SubjectAlternativeName):
        builder = builder.add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False
        )
    return builder.sign(signer, hashes.SHA256())


def _write_key(
    path: Path,
    key: ec.EllipticCurvePrivateKey,
    form: serialization.PrivateFormat = serialization.PrivateFormat.PKCS8,
) -> None:
    """A private key, which nobody but its owner may read."""
    data = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)


if __name__ == "__main__":
    main()
