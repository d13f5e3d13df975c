#!/usr/bin/env python3
"""The Dockerfile and the systemd unit, as far as this machine can tell: every file that the
Dockerfile copies and every make target or script that it runs is there; the unit is valid, confined,
and gives a drain its time, and serve takes its settings and the package's. Usage: check_files.py [TREADLE]"""

import os
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")


def read(*path):
    with open(os.path.join(ROOT, *path)) as file:
        return file.read()


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def check_dockerfile():
    steps = [line.split(None, 1) for line in read("deploy", "Dockerfile").replace("\\\n", " ").splitlines()
             if line and not line.startswith("#")]
    runs = [rest for verb, rest in steps if verb == "RUN"]
    targets = set(re.findall(r"^([a-z-]+)(?: [a-z -]+)?:", read("Makefile"), re.M))
    for verb, rest in steps:
        if verb == "COPY" and not rest.startswith("--from"):
            source = rest.split()[0]
            assert os.path.exists(os.path.join(ROOT, source)), f"COPY {source}: no such file"
    for command in runs:
        words = [word for word in command.split() if not word.startswith("--")]
        if words[0] == "make":
            assert set(words[1:]) <= targets, f"RUN {command}: the Makefile has {sorted(targets)}"
        elif "/" in words[0]:
            assert os.access(os.path.join(ROOT, words[0]), os.X_OK), f"RUN {command}: cannot be run"
    assert [rest for verb, rest in steps if verb == "USER"] == ["10001:10001"]
    assert steps[-2] == ["ENTRYPOINT", '["tini", "--", "treadle"]'], steps[-2]
    print(f"Dockerfile: {len(runs)} steps name what is there; not run here (no container engine)")


def check_settings(binary, unit):
    """serve takes the unit's settings, and the package's examples: those that win over the unit's."""
    given = dict(pair.split("=", 1) for pair in re.search(r"^Environment=(.*)$", unit, re.M)[1].split())
    examples = dict(re.findall(r"^#(TREADLE_\w+)=(.*)$", read("deploy", "package", "env"), re.M))
    assert examples
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TREADLE_")}
    for settings in (given, {**given, **examples}):
        printed = subprocess.run([binary, "serve", "--print-config"], capture_output=True, text=True,
                                 timeout=120, env={**clean, **settings})
        assert printed.returncode == 0, printed.stderr
        for variable, value in settings.items():
            name = variable.removeprefix("TREADLE_").lower().replace("_", "-")
            assert f"# from {variable}\n{name} = {value}\n" in printed.stdout, f"{variable} is no setting"


def check_unit(binary):
    unit = read("deploy", "systemd", "treadle.service.in")
    drain = int(re.search(r"^Environment=.*TREADLE_DRAIN_TIMEOUT=(\d+)s", unit, re.M)[1])
    stop = int(re.search(r"^TimeoutStopSec=(\d+)$", unit, re.M)[1])
    assert stop >= drain + 3, f"TimeoutStopSec is {stop}, TREADLE_DRAIN_TIMEOUT {drain}"
    said = "systemd-analyze is not installed"
    if shutil.which("systemd-analyze"):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "treadle.service")
            with open(path, "w") as file:
                file.write(unit.replace("@TREADLE_BINDIR@/treadle", os.path.abspath(binary or "/bin/true")))
            code, output = run("systemd-analyze", "verify", path)
            assert code == 0 and not output.strip(), output
            code, output = run("systemd-analyze", "security", "--offline=true", "--threshold=20", path)
            assert code == 0, output
            said = re.search(r"exposure level for \S+: ([\d.]+ \S+)", output)[1]
    if binary:
        check_settings(binary, unit)
    print(f"systemd unit: valid, exposure {said}")


if __name__ == "__main__":
    check_dockerfile()
    check_unit(*sys.argv[1:2] or [None])
