"""Certificates for the checks, by the openssl command: an authority and what it signs, in folders as
Kubernetes mounts a TLS Secret: tls.crt, tls.key, ca.crt."""

import os
import subprocess

CONFIG = "[req]\ndistinguished_name = name\n[name]\n"


def write(path, text):
    """Replaces the file as a whole, as whoever rotates a secret does."""
    with open(path + ".new", "w") as file:
        file.write(text)
    os.replace(path + ".new", path)


class Authority:
    def __init__(self, folder):
        self.folder = folder
        os.makedirs(folder)
        write(os.path.join(folder, "openssl.cnf"), CONFIG)
        self._make(os.path.join(folder, "ca.key"), os.path.join(folder, "ca.crt"), "/CN=test CA",
                   "basicConstraints=critical,CA:TRUE")

    def sign(self, folder, names):
        """`names`: what the certificate is for, such as DNS:localhost,IP:127.0.0.1."""
        os.makedirs(folder, exist_ok=True)
        path = {name: os.path.join(folder, name) for name in ("tls.key", "tls.crt", "ca.crt")}
        self._make(path["tls.key"] + ".new", path["tls.crt"] + ".new", "/CN=test", "subjectAltName=" + names,
                   "-CA", os.path.join(self.folder, "ca.crt"), "-CAkey", os.path.join(self.folder, "ca.key"))
        write(path["ca.crt"], open(os.path.join(self.folder, "ca.crt")).read())
        for name in ("tls.key", "tls.crt"):
            os.replace(path[name] + ".new", path[name])
        return path

    def _make(self, key, certificate, subject, extension, *more):
        command = ["openssl", "req", "-x509", "-config", os.path.join(self.folder, "openssl.cnf"), "-newkey", "ec",
                   "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2", "-subj", subject,
                   "-addext", extension, "-keyout", key, "-out", certificate, *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
