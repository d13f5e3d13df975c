#!/usr/bin/env python3
"""The Debian package and `cmake --install`: the package is built from the build folder that holds the
binary, its fields and files are what they should be, dpkg installs, upgrades, removes and purges it in
a folder, and the server starts from there as the unit says, and answers.
Usage: check_package.py TREADLE MODEL"""

import gzip
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

FILES = {
    "bin/treadle", "lib/systemd/system/treadle.service", "share/doc/treadle/README.md", "share/doc/treadle/deploy/README.md",
    "share/treadle/grafana/treadle.json", "share/treadle/nginx/grpc.conf",
    "share/treadle/prometheus/alerts.yaml", "share/treadle/prometheus/prometheus.yaml",
    "share/man/man1/treadle.1.gz", "share/bash-completion/completions/treadle", "share/zsh/vendor-completions/_treadle",
    "share/fish/vendor_completions.d/treadle.fish",
    "share/treadle/proto/server/inference.proto", "share/treadle/proto/server/rpc_details.proto",
}
FILES |= {f"share/doc/treadle/docs/{name}" for name in os.listdir(os.path.join(os.path.dirname(__file__), "../../docs"))}
# Licences of what is built into the program, if it could be fetched.
LICENSES = {f"share/doc/treadle/{name}" for name in ("xgrammar/LICENSE", "xgrammar/NOTICE", "picojson/LICENSE")}
DEBIAN = {"etc/treadle/env", "usr/share/doc/treadle/copyright", "usr/share/doc/treadle/changelog.gz"}
CLEAN = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "LC_ALL": "C"}


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, **options)
    assert done.returncode == 0, f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def files(root):
    return {os.path.relpath(os.path.join(folder, name), root) for folder, _, names in os.walk(root) for name in names}


def check_files(root, expected, licenses):
    assert files(root) in (expected, expected | licenses), sorted(files(root))


def read(*path):
    with open(os.path.join(*path)) as file:
        return file.read()


def check_control(deb, binary):
    version, _, digest = run(binary, "--version").split()[1].partition("+")
    assert re.fullmatch(r"\d+\.\d+\.\d+", version) and re.fullmatch(r"[0-9a-f]{8}", digest), (version, digest)
    fields = dict(re.findall(r"^([\w-]+): (.*)$", run("dpkg-deb", "--field", deb), re.M))
    assert os.path.basename(deb) == f"treadle_{version}_{fields['Architecture']}.deb", deb
    assert fields["Package"] == "treadle" and fields["Version"] == version, fields
    assert fields["Architecture"] == run("dpkg", "--print-architecture").strip(), fields
    linked = {line.split(" ")[0] for line in fields["Depends"].split(", ")}
    for library in ("libc6", "libstdc++6", "libgrpc++", "libprotobuf", "libssl"):
        assert any(name.startswith(library) for name in linked), f"{library} is not in Depends: {fields['Depends']}"
    return version, len(linked)


def check_dpkg(deb, root):
    """A life in a folder: dpkg runs the package's scripts, which leave this machine's systemd alone."""
    os.makedirs(os.path.join(root, "var/lib/dpkg/info"))
    os.makedirs(os.path.join(root, "var/lib/dpkg/updates"))
    open(os.path.join(root, "var/lib/dpkg/status"), "w").close()
    dpkg = ["dpkg", f"--root={root}", "--force-depends", "--force-script-chrootless", "--force-confold"]
    if os.geteuid() != 0:
        dpkg.insert(0, "fakeroot")
    run(*dpkg, "--install", deb)
    settings = os.path.join(root, "etc/treadle/env")
    with open(settings, "a") as file:
        file.write("TREADLE_MAX_QUEUE=7\n")
    model = os.path.join(root, "etc/treadle/model")
    os.symlink("/srv/models/m.gguf", model)
    state = os.path.join(root, "var/lib/private/treadle")
    os.makedirs(state)
    enabled = os.path.join(root, "etc/systemd/system/multi-user.target.wants/treadle.service")
    assert not os.path.lexists(enabled), "installing enables the service"
    os.makedirs(os.path.dirname(enabled))
    os.symlink("/lib/systemd/system/treadle.service", enabled)  # as systemctl enable does
    run(*dpkg, "--install", deb)
    assert read(settings).endswith("TREADLE_MAX_QUEUE=7\n"), "an upgrade overwrites the settings"
    yield
    run(*dpkg, "--remove", "treadle")
    assert os.path.exists(settings), "removing takes the settings"
    assert not os.path.exists(os.path.join(root, "usr/bin/treadle")), "removing leaves the binary"
    run(*dpkg, "--purge", "treadle")
    assert not os.path.exists(settings) and not os.path.exists(state), "purging leaves settings or state"
    assert os.path.islink(model), "purging takes what the administrator made"
    assert not os.path.lexists(enabled), "purging leaves the service enabled"


def check_prefix(root, prefix):
    """What is under root + prefix runs from there: the binary, the protocol's files, the unit."""
    installed = root + prefix
    dynamic = run("readelf", "--dynamic", f"{installed}/bin/treadle")
    assert "NEEDED" in dynamic and not re.search(r"RPATH|RUNPATH", dynamic), dynamic
    proto = f"{installed}/share/treadle/proto"
    run("protoc", "-I", proto, "--descriptor_set_out=/dev/null", *(p for p in files(proto)))
    run("bash", "-n", f"{installed}/share/bash-completion/completions/treadle")
    page = f"{installed}/share/man/man1/treadle.1.gz"
    with gzip.open(page, "rt") as text:
        assert text.readline().startswith(".TH TREADLE 1 "), page
    if shutil.which("man"):
        warnings = subprocess.run(["man", "--warnings=w", "-l", page], stdout=subprocess.DEVNULL,
                                  stderr=subprocess.PIPE, text=True, timeout=300, env={**CLEAN, "LC_ALL": "C.UTF-8"})
        assert warnings.returncode == 0 and not warnings.stderr, warnings.stderr
    unit = read(installed, "lib/systemd/system/treadle.service")
    start = re.search(r"^ExecStart=(\S+) serve$", unit, re.M)[1]
    assert start == f"{prefix}/bin/treadle", unit
    if shutil.which("systemd-analyze"):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "treadle.service")
            with open(path, "w") as file:
                file.write(unit.replace(start, root + start))
            verified = subprocess.run(["systemd-analyze", "verify", path], stdout=subprocess.PIPE,
                                      stderr=subprocess.STDOUT, text=True, timeout=300)
            assert verified.returncode == 0 and not verified.stdout.strip(), verified.stdout
    return dict(pair.split("=", 1) for pair in re.search(r"^Environment=(.*)$", unit, re.M)[1].split())


def wait_for(port, server):
    end = time.monotonic() + 300
    while time.monotonic() < end and server.poll() is None:
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    assert server.poll() is not None, "the server does not listen after 300 s"


def check_serve(installed, settings, binary, model):
    """A server with the unit's settings, but for this machine's model and ports, answers and drains."""
    ask = ["--temperature", "0", "--prompt", "Once upon a time", "--max-new-tokens", "16"]
    expected = run(binary, "generate", "--model", model, *ask)
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    here = {"TREADLE_MODEL": model, "TREADLE_LISTEN": f"127.0.0.1:{port}", "TREADLE_HTTP_LISTEN": "none",
            "TREADLE_METRICS_LISTEN": "none", "TREADLE_KV_MEMORY": "256M"}
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen([f"{installed}/bin/treadle", "serve"], stderr=log, cwd="/",
                                  env={**CLEAN, **settings, **here})
        try:
            wait_for(port, server)
            if server.poll() is None:
                answer = run(f"{installed}/bin/treadle", "generate", "--target", f"127.0.0.1:{port}", *ask,
                             env=CLEAN, cwd="/")
                assert answer == expected, f"{answer!r}, expected {expected!r}"
                server.send_signal(signal.SIGTERM)
            code = server.wait(timeout=60)
            log.seek(0)
            assert code == 0, f"the server ended with exit code {code}: {log.read()}"
        finally:
            server.kill()


def main(binary, model):
    build = os.path.dirname(os.path.abspath(binary))
    with tempfile.TemporaryDirectory() as folder:
        run("cpack", "--config", f"{build}/CPackConfig.cmake", "-B", folder)
        deb, = (os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".deb"))
        version, depends = check_control(deb, binary)
        root = os.path.join(folder, "root")
        run("dpkg-deb", "--extract", deb, root)
        check_files(root, {f"usr/{name}" for name in FILES} | DEBIAN, {f"usr/{name}" for name in LICENSES})
        with gzip.open(f"{root}/usr/share/doc/treadle/changelog.gz", "rt") as changelog:
            first = changelog.readline()
        assert first.startswith(f"treadle ({version}) "), f"deploy/package/changelog begins with {first}"
        settings = check_prefix(root, "/usr")
        said = "dpkg not tried (neither root nor fakeroot)"
        if os.geteuid() == 0 or shutil.which("fakeroot"):
            shutil.rmtree(root)
            life = check_dpkg(deb, root)
            next(life)
            check_serve(f"{root}/usr", settings, binary, model)
            assert next(life, None) is None
            said = "installed, upgraded, served from, removed and purged"
        else:
            check_serve(f"{root}/usr", settings, binary, model)
        print(f"package: {os.path.basename(deb)}, {os.path.getsize(deb) / 1e6:.1f} MB, {depends} dependencies; {said}")
        if shutil.which("lintian"):
            run("lintian", "--fail-on", "error", "--allow-root", deb)
            print("lintian: no errors")

        prefix = os.path.join(folder, "opt", "treadle")
        run("cmake", "--install", build, "--prefix", prefix)
        check_files(prefix, FILES | {"share/doc/treadle/LICENSE"}, LICENSES)
        check_serve(prefix, check_prefix("", prefix), binary, model)
        print("cmake --install: runs from any prefix")


if __name__ == "__main__":
    main(*sys.argv[1:3])
