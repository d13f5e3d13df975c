#!/usr/bin/env python3
"""The chart through real Helm: lint, every good value set rendered and validated, every bad one
refused for the reason it names, package. With a binary, every rendered command line through its
flag parser. Usage: check_chart.py HELM [TREADLE]. Environment: TREADLE_CRDS, a folder with
CustomResourceDefinitions (*.yaml): custom objects are then validated against them too."""

import glob
import os
import re
import subprocess
import sys
import tempfile

import jsonschema
import kubernetes_validate
import yaml

HERE = os.path.dirname(os.path.abspath(__file__))
CHART = os.path.join(HERE, "..", "helm", "treadle")
KUBERNETES = "1.33"
# Kinds that Kubernetes itself does not have; their pod templates are validated as Pods.
CUSTOM = {"LeaderWorkerSet", "ServiceMonitor", "ScaledObject", "InferencePool", "HTTPRoute"}
MARKER = "no-such-word"


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def load_crds(folder):
    """Kind -> (apiVersion, schema), unknown fields forbidden where the schema lists fields."""

    def strict(node):
        if isinstance(node, dict):
            if "properties" in node and not node.get("x-kubernetes-preserve-unknown-fields"):
                node.setdefault("additionalProperties", False)
            if node.pop("x-kubernetes-int-or-string", False):
                node.pop("type", None)
                node["anyOf"] = [{"type": "integer"}, {"type": "string"}]
            for value in node.values():
                strict(value)
        elif isinstance(node, list):
            for value in node:
                strict(value)

    crds = {}
    for path in glob.glob(os.path.join(folder, "*.yaml")) if folder else []:
        for crd in yaml.safe_load_all(open(path)):
            for version in crd["spec"]["versions"] if crd else []:
                schema = version["schema"]["openAPIV3Schema"]
                strict(schema)
                schema["properties"]["metadata"] = {"type": "object"}
                name = f"{crd['spec']['group']}/{version['name']}"
                crds[crd["spec"]["names"]["kind"], name] = schema
    return crds


def pod_templates(document):
    """Every {metadata, spec: {containers}} within an object."""
    if isinstance(document, dict):
        if isinstance(document.get("spec"), dict) and "containers" in document["spec"]:
            yield document
        for value in document.values():
            yield from pod_templates(value)


def validate(document, crds):
    kind = document["kind"]
    if kind not in CUSTOM:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
        return
    if crds:
        jsonschema.validate(document, crds[kind, document["apiVersion"]])
    for template in pod_templates(document):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", **template["metadata"]},
               "spec": template["spec"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def problems_of_pod(template, values):
    """What no schema says."""
    spec = template["spec"]
    if not spec["securityContext"]["runAsNonRoot"]:
        yield "may run as root"
    volumes = {volume["name"] for volume in spec["volumes"]}
    for container in spec.get("initContainers", []) + spec["containers"]:
        security = container["securityContext"]
        if security["allowPrivilegeEscalation"] or not security["readOnlyRootFilesystem"]:
            yield f"{container['name']} is not confined"
        mounts = [mount["name"] for mount in container["volumeMounts"]]
        if not set(mounts) <= volumes:
            yield f"{container['name']} mounts {set(mounts) - volumes}, which is no volume"
    for container in spec["containers"]:
        before = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        drain = [int(re.search(r"\d+", arg)[0]) for arg in container["args"]
                 if arg.startswith("--drain-timeout=")]
        if spec["terminationGracePeriodSeconds"] < before + sum(drain) + 3:
            yield "is killed before its drain ends"
    if template["metadata"]["labels"]["app.kubernetes.io/component"] == "router":
        return
    gpu = values.get("gpu", {}).get("count", 0)
    worker = spec["containers"][0]["args"][0] == "worker"
    have = int(spec["containers"][0]["resources"].get("limits", {}).get("nvidia.com/gpu", 0))
    grid = values.get("parallelism", {})
    one_pod = grid.get("pipeline", 1) == 1 or grid.get("topology") == "SinglePod"
    expected = gpu if one_pod else grid.get("tensor", 1) * (gpu > 0) * worker
    if have != expected:
        yield f"has {have} GPUs, expected {expected}"


def check_command(binary, args):
    """None, or what the binary's flag parser objects to. All values are read before the parser
    complains of the marker, and nothing is started."""
    args = [arg.replace("$(GROUP)", "0") for arg in args]  # the kubelet's substitution
    # Twice: a command without --model takes one word for it.
    code, output = run(binary, *args, MARKER, MARKER)
    expected = rf"treadle {args[0]}: The following arguments? (was|were) not expected: {MARKER} "
    return None if code == 2 and re.match(expected, output) else output.strip()


def backends(document):
    """The Services and their ports to which an Ingress or an HTTPRoute leads."""
    for rule in document["spec"]["rules"] if document["kind"] in ("Ingress", "HTTPRoute") else []:
        for reference in rule.get("backendRefs", []):
            yield reference["name"], reference["port"]
        for path in rule.get("http", {}).get("paths", []):
            yield path["backend"]["service"]["name"], path["backend"]["service"]["port"]["name"]


def check_good(helm, path, crds, commands):
    code, output = run(helm, "lint", "--strict", CHART, "--values", path)
    if code != 0:
        yield "lint: " + output
    code, output = run(helm, "template", "chat", CHART, "--namespace", "serving", "--values", path)
    if code != 0:
        yield "template: " + output
        return
    code, notes = run(helm, "install", "chat", CHART, "--dry-run=client", "--values", path)
    if code != 0 or "treadle generate --target" not in notes:
        yield "notes: " + notes[-500:]
    documents = [document for document in yaml.safe_load_all(output) if document]
    values = yaml.safe_load(open(path)) or {}
    names = [(document["kind"], document["metadata"]["name"]) for document in documents]
    if len(set(names)) != len(names):
        yield f"two objects of one name: {names}"
    labels = [template["metadata"]["labels"] for document in documents
              for template in pod_templates(document)]
    ports = {(document["metadata"]["name"], port[key]) for document in documents if document["kind"] == "Service"
             for port in document["spec"]["ports"] for key in ("name", "port") if key in port}
    for document in documents:
        for backend in backends(document):
            if backend not in ports:
                yield f"{document['kind']} leads to {backend}, which no Service has"
        try:
            validate(document, crds)
        except Exception as error:  # the validators' exceptions share no base class
            yield f"{document['kind']}: {str(error).splitlines()[0]}"
        for template in pod_templates(document):
            for problem in problems_of_pod(template, values):
                yield f"{document['kind']} {document['metadata']['name']}: {problem}"
            for container in template["spec"]["containers"]:
                if container["name"] != "treadle":
                    continue
                commands.setdefault(tuple(container["args"]), os.path.basename(path))
        selector = document.get("spec", {}).get("selector") or document.get("spec", {}).get("podSelector")
        wanted = (selector or {}).get("matchLabels", selector) if document["kind"] != "ServiceMonitor" else None
        if wanted and not any(wanted.items() <= have.items() for have in labels):
            yield f"{document['kind']} {document['metadata']['name']} selects no pod: {wanted}"


def check_bad(helm, path):
    reason = re.match(r"# refused: (.*)", open(path).readline())[1]
    code, output = run(helm, "template", "chat", CHART, "--values", path)
    if code == 0:
        yield f"was rendered, expected: {reason}"
    elif not re.search(reason, output):
        yield f"was refused, but not for {reason}: {output}"


def main():
    helm, binary = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
    crds = load_crds(os.environ.get("TREADLE_CRDS"))
    failures, commands = [], {}
    good = sorted(glob.glob(os.path.join(HERE, "good", "*.yaml")))
    bad = sorted(glob.glob(os.path.join(HERE, "bad", "*.yaml")))
    for path in good:
        failures += [f"{os.path.basename(path)}: {p}" for p in check_good(helm, path, crds, commands)]
    for path in bad:
        failures += [f"{os.path.basename(path)}: {p}" for p in check_bad(helm, path)]
    with tempfile.TemporaryDirectory() as folder:
        code, output = run(helm, "package", CHART, "--destination", folder)
        if code != 0 or not glob.glob(os.path.join(folder, "treadle-*.tgz")):
            failures.append("package: " + output)
    parsed = "no binary was given: command lines were not parsed"
    if binary:
        for args, source in commands.items():
            problem = check_command(binary, args)
            if problem:
                failures.append(f"{source}: {' '.join(args)}: {problem}"[:400])
        parsed = f"{len(commands)} command lines read by {binary}"
    for failure in failures:
        print("FAILED", failure)
    print(f"chart: {len(good)} value sets rendered and valid for Kubernetes {KUBERNETES}, "
          f"{len(bad)} refused, packaged; {parsed}; {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
