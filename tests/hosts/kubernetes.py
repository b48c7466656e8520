"""Kubernetes as far as a KubeCluster uses it: an API that refuses what the schemas of Dask's operator do not allow, and
runs the operator's own deployments as processes of this host."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import jsonschema

from tests.dask.commands import free_port
from tests.dask.processes import ROOT
from tests.dask.schemas import schema_of

GROUP = "kubernetes.dask.org/v1"
_PROGRAMS = {"hpstage": "hpstage", "dask-scheduler": "distributed.cli.dask_scheduler"}
_KUBECONFIG = """\
apiVersion: v1
kind: Config
current-context: here
contexts: [{{name: here, context: {{cluster: here, user: me, namespace: default}}}}]
clusters: [{{name: here, cluster: {{server: "http://127.0.0.1:{port}"}}}}]
users: [{{name: me, user: {{token: "none"}}}}]
"""


class Kubernetes:
    """The objects that there are, by plural and name, and the processes of their pods."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.pods: dict[str, subprocess.Popen[bytes]] = {}
        self.schemas = {f"{kind}s": schema_of(kind) for kind in ("daskcluster", "daskworkergroup")}
        self.ports = free_port(), free_port()
        self._lock = threading.Lock()

    def create(self, plural: str, resource: dict[str, Any]) -> dict[str, Any]:
        """Do what the operator does. Raises :class:`jsonschema.ValidationError`."""
        if plural in self.schemas:
            jsonschema.Draft202012Validator(self.schemas[plural]).validate(resource["spec"])
        resource["metadata"]["namespace"] = "default"
        self.objects[plural, resource["metadata"]["name"]] = resource
        if plural == "daskclusters":
            self._create_parts(resource)
        if plural == "daskworkergroups":
            self.scale(resource)
        return resource

    def _create_parts(self, cluster: dict[str, Any]) -> None:
        from dask_kubernetes.operator.controller import controller

        name, spec = cluster["metadata"]["name"], cluster["spec"]
        pod = controller.build_scheduler_deployment_spec(name, spec["scheduler"]["spec"], {}, {})
        self._run(pod, "--port", str(self.ports[0]), "--dashboard-address", f"127.0.0.1:{self.ports[1]}")
        state = {
            "phase": "Running",
            "conditions": [{"type": kind, "status": "True"} for kind in ("Ready", "ContainersReady")],
        }
        self.create("pods", {**pod["spec"]["template"], "status": state})
        service = controller.build_scheduler_service_spec(name, spec["scheduler"]["service"], {}, {})
        for port, ours in zip(service["spec"]["ports"], self.ports, strict=True):
            port["port"] = ours
        self.create("services", {**service, "status": {"loadBalancer": {"ingress": [{"ip": "127.0.0.1"}]}}})
        self.create("daskworkergroups", controller.build_default_worker_group_spec(name, spec["worker"], {}, {}))
        cluster["status"] = {"phase": "Running"}

    def scale(self, group: dict[str, Any]) -> None:
        """Start pods, or end some as an evicted one is."""
        from dask_kubernetes.operator.controller import controller

        name, spec = group["metadata"]["name"], group["spec"]
        with self._lock:
            pods = [pod for pod in self.pods if pod.startswith(f"{name}-worker-")]
            for pod in pods[spec["worker"]["replicas"] :]:
                end(self.pods.pop(pod))
            for number in range(len(pods), spec["worker"]["replicas"]):
                deployment = controller.build_worker_deployment_spec(
                    name, "default", spec["cluster"], str(number), spec["worker"]["spec"], {}, {}
                )
                self._run(deployment, DASK_SCHEDULER_ADDRESS=f"tcp://127.0.0.1:{self.ports[0]}")

    def _run(self, deployment: dict[str, Any], *more: str, **variables: str) -> None:
        name = deployment["metadata"]["name"]
        [container] = deployment["spec"]["template"]["spec"]["containers"]
        given = {variable["name"]: variable["value"] for variable in container["env"] or ()} | variables
        words = [re.sub(r"\$\((\w+)\)", lambda found: given[found[1]], word) for word in container["args"]]
        with (self.folder / f"{name}.log").open("wb") as log:
            self.pods[name] = subprocess.Popen(
                [sys.executable, "-m", _PROGRAMS[words[0]], *words[1:], *more],
                cwd=self.folder, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": str(ROOT), **given},
            )  # fmt: skip

    def delete(self, plural: str, name: str) -> None:
        del self.objects[plural, name]
        if plural == "daskclusters":
            for pod in reversed(self.pods.values()):
                end(pod)
            self.pods.clear()
            self.objects.clear()


def end(pod: subprocess.Popen[bytes]) -> None:
    pod.send_signal(signal.SIGTERM)
    pod.wait(60)


@contextmanager
def kubernetes(folder: Path) -> Iterator[tuple[Kubernetes, Path]]:
    """Serve the API; yield it, and the file that KUBECONFIG names."""
    here = Kubernetes(folder)

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            body = json.loads(self.rfile.read(length)) if length else {}
            status, answer = _handle(here, self.command, self.path, body)
            text = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_PATCH = do_DELETE = _answer  # its names

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        (folder / "kubeconfig").write_text(_KUBECONFIG.format(port=server.server_port))
        yield here, folder / "kubeconfig"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        for pod in here.pods.values():
            pod.kill()
            pod.wait()


_RESOURCES = {
    "v1": {"pods": "Pod", "services": "Service"},
    GROUP: {
        "daskclusters": "DaskCluster",
        "daskworkergroups": "DaskWorkerGroup",
        "daskautoscalers": "DaskAutoscaler",
    },
}


def _handle(here: Kubernetes, method: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return the status and what is answered."""
    place = urlsplit(path)
    words = place.path.strip("/").split("/")
    if "namespaces" not in words:
        return 200, _discovery(place.path.rstrip("/"))
    plural, *rest = words[words.index("namespaces") + 2 :]
    if method == "POST":
        try:
            return 201, here.create(plural, _without_nulls(body))
        except jsonschema.ValidationError as error:
            return 422, {"kind": "Status", "message": error.message}
    if not rest:
        return 200, {"kind": "List", "items": list(_selected(here, plural, parse_qs(place.query)))}
    resource = here.objects.get((plural, rest[0]))
    if resource is None:
        return 404, {"kind": "Status", "message": f"{plural} {rest[0]} not found"}
    if method == "PATCH":
        resource["spec"]["worker"]["replicas"] = body["spec"]["worker"]["replicas"]
        here.scale(resource)
    if method == "DELETE":
        here.delete(plural, rest[0])
    return 200, resource


def _without_nulls(resource: Any) -> Any:
    """As Kubernetes reads it: fields that are null are left out where null is not a value."""
    if isinstance(resource, list):
        return [_without_nulls(one) for one in resource]
    if isinstance(resource, dict):
        return {name: _without_nulls(one) for name, one in resource.items() if one is not None}
    return resource


def _discovery(path: str) -> dict[str, Any]:
    if path == "/version":
        return {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}
    if path == "/api":
        return {"versions": ["v1"]}
    if path == "/apis":
        return {"groups": [{"name": GROUP.partition("/")[0], "versions": [{"groupVersion": GROUP, "version": "v1"}]}]}
    kinds = _RESOURCES[path.removeprefix("/apis/").removeprefix("/api/")]
    return {
        "resources": [
            {"name": plural, "singularName": kind.lower(), "kind": kind, "namespaced": True}
            for plural, kind in kinds.items()
        ]
    }


def _selected(here: Kubernetes, plural: str, query: dict[str, list[str]]) -> Iterator[dict[str, Any]]:
    labels = dict(one.split("=") for one in query.get("labelSelector", [""])[0].split(",") if one)
    fields = dict(one.split("=") for one in query.get("fieldSelector", [""])[0].split(",") if one)
    for (kind, name), resource in here.objects.items():
        fits = labels.items() <= resource["metadata"].get("labels", {}).items()
        if kind == plural and fits and fields.get("metadata.name", name) == name:
            yield resource
