#!/usr/bin/env python3
"""Checks the manifests of tools/packaging/kubernetes without a cluster: fields, types, and values that must agree.

    tools/check_kubernetes.py [FOLDER]

A schema below has the fields that the manifests use, from the API references of Kubernetes 1.30 (core/v1, batch/v1) and
of Kubeflow's MPI operator (kubeflow.org/v2beta1). Another field is an error, as `kubectl apply --validate=strict` says.
"""

import pathlib
import re
import sys

try:
    import yaml
except ImportError:
    print("check_kubernetes: skipped, there is no PyYAML (python3-yaml)")
    sys.exit(77)

FOLDER = pathlib.Path(__file__).parent / "packaging" / "kubernetes"
NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
QUANTITY = re.compile(r"[0-9]+(m|Ki|Mi|Gi|Ti)?")


def one_of(*values):
    return re.compile("|".join(map(re.escape, values)))


TEXTS = [str]
ENV = [{"name!": re.compile(r"[A-Z_]+"), "value": str,
        "valueFrom": {"fieldRef": {"fieldPath!": str}, "secretKeyRef": {"name!": NAME, "key!": str}}}]
POD = {
    "subdomain": NAME, "restartPolicy": one_of("Never", "OnFailure"), "terminationGracePeriodSeconds": int,
    "containers!": [{"name!": NAME, "image!": str, "command": TEXTS, "args": TEXTS, "env": ENV,
                     "securityContext": {"runAsUser": int},
                     "resources": {"limits": {"cpu": QUANTITY, "memory": QUANTITY}},
                     "volumeMounts": [{"name!": NAME, "mountPath!": str}]}],
    "volumes": [{"name!": NAME, "persistentVolumeClaim": {"claimName!": NAME}}],
}
TEMPLATE = {"spec!": POD}
METADATA = {"name!": NAME}
REPLICAS = {"replicas!": int, "restartPolicy": one_of("Never", "OnFailure"), "template!": TEMPLATE}
KINDS = {
    ("v1", "Service"): {"clusterIP": one_of("None"), "publishNotReadyAddresses": bool, "selector": {"job-name": NAME},
                        "ports!": [{"name": NAME, "port!": int}]},
    ("batch/v1", "Job"): {"completionMode": one_of("Indexed"), "completions": int, "parallelism": int,
                          "backoffLimit": int, "template!": TEMPLATE},
    ("kubeflow.org/v2beta1", "MPIJob"): {
        "slotsPerWorker": int, "mpiImplementation": one_of("OpenMPI", "Intel", "MPICH"), "sshAuthMountPath": str,
        "runPolicy": {"cleanPodPolicy": one_of("None", "Running", "All"), "backoffLimit": int},
        "mpiReplicaSpecs!": {"Launcher!": REPLICAS, "Worker!": REPLICAS}},
}


def check(value, schema, path):
    """Yields the errors of a value. A key with "!" is required; a pattern is of a whole string."""
    if isinstance(schema, dict):
        if not isinstance(value, dict):
            yield f"{path} is {value!r}; expected fields"
            return
        fields = {key.rstrip("!"): (key.endswith("!"), of) for key, of in schema.items()}
        yield from (f"{path}.{key} is unknown" for key in value.keys() - fields.keys())
        for key, (is_required, of) in fields.items():
            if key in value:
                yield from check(value[key], of, f"{path}.{key}")
            elif is_required:
                yield f"{path}.{key} is missing"
    elif isinstance(schema, list):
        if not isinstance(value, list) or not value:
            yield f"{path} is {value!r}; expected a list"
            return
        for number, entry in enumerate(value):
            yield from check(entry, schema[0], f"{path}[{number}]")
    elif isinstance(schema, re.Pattern):
        if not isinstance(value, str) or not schema.fullmatch(value):
            yield f"{path} is {value!r}; expected {schema.pattern}"
    elif type(value) is not schema:
        yield f"{path} is {value!r}; expected {schema.__name__}"


def mounts(pod):
    volumes = {volume["name"] for volume in pod.get("volumes", [])}
    for container in pod["containers"]:
        yield from (f"volume {mount['name']} is not in the pod" for mount in container.get("volumeMounts", [])
                    if mount["name"] not in volumes)


def agree(what, *values):
    if len(set(map(str, values))) > 1:
        yield f"{what} are {', '.join(map(str, values))}; expected equal values"


def check_job(job, service):
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    environment = {entry["name"]: entry for entry in pod["containers"][0]["env"]}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if name not in environment:
            yield f"torchrun's variable {name} is missing"
            return
    text = {name: entry.get("value") for name, entry in environment.items()}
    yield from agree("WORLD_SIZE, completions, parallelism", text["WORLD_SIZE"], spec["completions"], spec["parallelism"])
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    yield from agree("RANK's field and the index", environment["RANK"]["valueFrom"]["fieldRef"]["fieldPath"], index)
    yield from agree("the names of the service", service["metadata"]["name"], pod["subdomain"])
    yield from agree("the service's selector and the job", service["spec"]["selector"]["job-name"], job["metadata"]["name"])
    yield from agree("MASTER_ADDR and pod 0", text["MASTER_ADDR"], f"{job['metadata']['name']}-0.{pod['subdomain']}")
    yield from agree("MASTER_PORT and the service's port", text["MASTER_PORT"], service["spec"]["ports"][0]["port"])
    yield from mounts(pod)


def check_mpi_job(job):
    spec = job["spec"]
    launcher, worker = (spec["mpiReplicaSpecs"][name] for name in ("Launcher", "Worker"))
    container = launcher["template"]["spec"]["containers"][0]
    command = " ".join(container["command"] + container["args"])
    ranks = re.search(r"mpirun -np (\d+)", command)
    yield from agree("-np, replicas * slotsPerWorker", ranks and ranks[1], worker["replicas"] * spec["slotsPerWorker"])
    for name in ("MASTER_ADDR", "TESSERA_STORE_TOKEN"):
        if f"-x {name}" not in command:
            yield f"mpirun does not export {name}"
    yield from agree("sshAuthMountPath, the folder of sshd's settings", spec["sshAuthMountPath"].rsplit("/", 1)[0],
                     worker["template"]["spec"]["containers"][0]["args"][-1].rsplit("/", 1)[0])
    yield from mounts(launcher["template"]["spec"])
    yield from mounts(worker["template"]["spec"])


def errors_of(documents):
    for document in documents:
        kind = (document.get("apiVersion"), document.get("kind"))
        if kind not in KINDS:
            yield f"{kind} is unknown"
            continue
        schema = {"apiVersion!": str, "kind!": str, "metadata!": METADATA, "spec!": KINDS[kind]}
        yield from check(document, schema, kind[1])


def errors_between(documents):
    of_kind = {document["kind"]: document for document in documents}
    if "Job" in of_kind:
        yield from check_job(of_kind["Job"], of_kind["Service"])
    if "MPIJob" in of_kind:
        yield from check_mpi_job(of_kind["MPIJob"])


def main():
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    files = sorted(folder.glob("*.yaml"))
    errors = [] if files else [f"{folder} has no manifest"]
    for file in files:
        documents = list(yaml.safe_load_all(file.read_text()))
        found = list(errors_of(documents)) or list(errors_between(documents))
        errors += [f"{file.name}: {error}" for error in found]
    print(*(f"check_kubernetes: {error}" for error in errors), sep="\n", end="\n" if errors else "")
    print(f"check_kubernetes: {len(files)} files, {len(errors)} problems")
    sys.exit(bool(errors))


if __name__ == "__main__":
    main()
