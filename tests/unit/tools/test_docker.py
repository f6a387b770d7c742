# SPDX-License-Identifier: Apache-2.0
"""What lies in docker/, against schemas and linters; none of it has been run in a container."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from compose_spec import PyCompose

from python_backends.llm.engines.config import TensorRTLLMConfig
from tools.deployment import Deployment, load_deployment
from tools.validate import config_problems

ROOT = Path(__file__).parents[3]
DOCKER = ROOT / "docker"
KUBERNETES = DOCKER / "kubernetes"
BASE, GROUP = KUBERNETES / "base", KUBERNETES / "tensor-parallel"
VERSION = "1.33"  # of Kubernetes
LINTER = Path(sys.executable).with_name("hadolint")


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def manifests() -> list[dict[str, Any]]:
    """Every object of the base."""
    (base,) = documents(BASE / "kustomization.yaml")
    return [document for name in base["resources"] for document in documents(BASE / name)]


def group_of_nodes() -> dict[str, Any]:
    """The LLM over several nodes."""
    (group,) = documents(GROUP / "llm.yaml")
    return group


def valid(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, VERSION, strict=True)


def pods(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """The templates of an object's pods."""
    spec = manifest.get("spec", {})
    group = spec.get("leaderWorkerTemplate", {})
    found = (spec.get("template"), group.get("leaderTemplate"), group.get("workerTemplate"))
    return [template for template in found if template is not None]


def test_the_linter_has_nothing_to_say_of_the_dockerfile() -> None:
    done = subprocess.run(
        [str(LINTER), "--no-color", str(DOCKER / "Dockerfile")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_has_what_it_copies_and_its_commands_are_ours() -> None:
    text = (DOCKER / "Dockerfile").read_text()
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE):
        for source in shlex.split(line)[:-1]:
            assert (ROOT / source).exists() and f"!{source}" in ignored
    command = re.search(r'ENTRYPOINT \["(\w+)"\]\nCMD \["(\w+)", "([^"]+)"\]', text)
    assert command is not None and command.groups() == ("tokenrouter", "serve", "/etc/tokenrouter/deployment.yaml")
    for words in ("serve --help", "health --help"):
        subprocess.run([str(LINTER.with_name("tokenrouter")), *words.split()], check=True, capture_output=True)


def test_no_registry_is_named() -> None:
    for path in [ROOT / ".dockerignore", *(p for p in DOCKER.rglob("*") if p.is_file())]:
        for image in re.findall(r"(?:FROM|image:|newName:) *(\S+)", path.read_text()):
            host, slash, _ = image.partition("/")
            assert not slash or host == "${REGISTRY}" or "." not in host, f"{path}: {image}"


def test_the_compose_file_is_one() -> None:
    text = (DOCKER / "compose.yaml").read_text()
    given = {"REGISTRY": "registry/nvidia", "MODELS": "/given/models"}  # from the environment, or with a message
    text = re.sub(r"\$\{(\w+):\?[^}]+\}", lambda match: given[match[1]], text)
    compose = PyCompose.from_yaml(text)
    compose.validate()
    assert compose.service_names() == ["tokenrouter", "prometheus"]
    services = documents(DOCKER / "compose.yaml")[0]["services"]
    for service in services.values():
        for mount in service["volumes"]:
            source = mount.split(":")[0]
            assert not source.startswith("./") or (DOCKER / source).exists()
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])  # Triton's ports ask for no password
    (scraped,) = documents(DOCKER / "prometheus" / "prometheus.yaml")
    assert scraped["scrape_configs"][0]["static_configs"] == [{"targets": ["tokenrouter:8002"]}]
    server = load_deployment(DOCKER / "deployment.yaml").server
    assert float(services["tokenrouter"]["stop_grace_period"].rstrip("s")) > server.drain_timeout_s + 10


def test_the_check_of_compose_files_can_fail() -> None:
    with pytest.raises(Exception, match="typo"):
        PyCompose.from_yaml("services: {a: {image: b, typo: 1}}").validate()


@pytest.mark.parametrize("manifest", manifests(), ids=lambda m: f"{m['kind']} {m['metadata']['name']}")
def test_every_manifest_keeps_to_the_schema(manifest: dict[str, Any]) -> None:
    valid(manifest)


def test_the_check_of_manifests_can_fail() -> None:
    broken = next(m for m in manifests() if m["kind"] == "StatefulSet")
    broken["spec"]["template"]["spec"]["containers"][0]["imagee"] = "x"
    with pytest.raises(kubernetes_validate.ValidationError, match="imagee"):
        valid(broken)


def test_the_pods_of_a_group_of_nodes_keep_to_the_schema() -> None:
    """Its own kind is no part of Kubernetes, and unchecked."""
    group = group_of_nodes()
    assert group["kind"] == "LeaderWorkerSet"
    templates = pods(group)
    assert len(templates) == 2
    for template in templates:
        valid({"apiVersion": "v1", "kind": "Pod", **template})


def test_what_refers_to_something_finds_it() -> None:
    everything = [*manifests(), group_of_nodes()]
    names = {(m["kind"], m["metadata"]["name"]) for m in everything}
    labels = [template["metadata"]["labels"]["app"] for m in everything for template in pods(m)]
    for manifest in everything:
        spec = manifest.get("spec", {})
        if manifest["kind"] == "Service":
            assert spec["selector"]["app"] in labels
        if manifest["kind"] == "StatefulSet":
            assert ("Service", spec["serviceName"]) in names
        for template in pods(manifest):
            pod = template["spec"]
            volumes = {volume["name"] for volume in pod["volumes"]}
            for container in [*pod.get("initContainers", []), *pod["containers"]]:
                assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
                assert container["image"] == "tokenrouter"
            for volume in pod["volumes"]:
                if "configMap" in volume:
                    assert volume["configMap"]["name"] == "deployment"
                if "persistentVolumeClaim" in volume:
                    assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in names


def test_both_name_their_deployment_the_same() -> None:
    """By the name that the cluster has: a hash behind it would be put into the references that kustomize knows, and
    those of a LeaderWorkerSet aren't among them."""
    for folder, behavior in ((BASE, None), (GROUP, "merge")):
        (made,) = documents(folder / "kustomization.yaml")
        assert made["generatorOptions"]["disableNameSuffixHash"] is True
        (config,) = made["configMapGenerator"]
        assert (config["name"], config["files"], config.get("behavior")) == (
            "deployment",
            ["deployment.yaml"],
            behavior,
        )


def test_no_kustomization_lies_in_one_that_it_builds_on() -> None:
    """That is a cycle to kustomize, and it builds nothing."""
    for path in KUBERNETES.rglob("kustomization.yaml"):
        (made,) = documents(path)
        folders = [folder for name in made["resources"] if (folder := (path.parent / name).resolve()).is_dir()]
        assert not any(path.resolve().is_relative_to(folder) for folder in folders), path


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl isn't here")
@pytest.mark.parametrize("folder", [BASE, GROUP], ids=lambda folder: folder.name)
def test_kustomize_builds_it(folder: Path) -> None:
    built = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    made = {(m["kind"], m["metadata"]["name"]): m for m in yaml.safe_load_all(built.stdout)}
    llm = "LeaderWorkerSet" if folder == GROUP else "StatefulSet"
    assert {kind for kind, name in made if name == "llm"} - {"Service", "NetworkPolicy"} == {llm}
    assert made["ConfigMap", "deployment"]["data"] == {"deployment.yaml": (folder / "deployment.yaml").read_text()}
    for manifest in made.values():
        assert manifest["kind"] == "Namespace" or manifest["metadata"]["namespace"] == "tokenrouter"
        for pod in pods(manifest):
            assert pod["spec"]["containers"][0]["image"] == "tokenrouter:latest"


def test_an_llm_has_its_nodes_for_itself() -> None:
    llm = next(m for m in manifests() if (m["kind"], m["metadata"]["name"]) == ("StatefulSet", "llm"))
    routers = {"router"}
    for manifest in (llm, group_of_nodes()):
        apart = {pod["metadata"]["labels"]["app"] for pod in pods(manifest)} | routers
        for pod in pods(manifest):
            affinity = pod["spec"]["affinity"]["podAntiAffinity"]
            (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]
            assert term["topologyKey"] == "kubernetes.io/hostname"
            (expression,) = term["labelSelector"]["matchExpressions"]
            assert (expression["key"], expression["operator"], set(expression["values"])) == ("app", "In", apart)
    assert routers == {p["metadata"]["labels"]["app"] for m in manifests() for p in pods(m)} - {"llm"}


def test_the_nodes_of_one_llm_reach_each_other() -> None:
    labels = {template["metadata"]["labels"]["app"] for template in pods(group_of_nodes())}
    (policy,) = documents(BASE / "network.yaml")
    everything_from = [rule["from"] for rule in policy["spec"]["ingress"] if "ports" not in rule]
    expressions = [e for peers in everything_from for p in peers for e in p["podSelector"]["matchExpressions"]]
    assert [(e["key"], e["operator"], set(e["values"])) for e in expressions] == [("app", "In", labels)]


def _of_replica(number: int, folder: Path, pod: dict[str, Any], given: Path) -> Deployment:
    """As the pod's init container makes it. given: the folder of the deployment in the ConfigMap."""
    path = folder / "deployment.yaml"
    path.write_text((given / "deployment.yaml").read_text())
    command = pod["spec"]["initContainers"][0]["command"]
    told = command[2].replace("/given/deployment.yaml", str(path)).replace("/etc/tokenrouter/", f"{folder}/out-")
    subprocess.run([*command[:2], told], env={"REPLICA": str(number), "PATH": "/usr/bin:/bin"}, check=True)
    return load_deployment(folder / "out-deployment.yaml")


def _gpus(pod: dict[str, Any]) -> int:
    gpus: int = pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    return gpus


def _sets() -> dict[str, dict[str, Any]]:
    """The one pod template of each StatefulSet."""
    return {m["metadata"]["name"]: pods(m)[0] for m in manifests() if m["kind"] == "StatefulSet"}


@pytest.mark.parametrize("folder", [BASE, GROUP], ids=lambda folder: folder.name)
def test_each_replica_has_an_llm_of_its_own(folder: Path, tmp_path: Path) -> None:
    llm = _sets()["llm"] if folder == BASE else pods(group_of_nodes())[0]
    for number in (0, 1):
        deployment = _of_replica(number, tmp_path, _sets()["router"], folder)
        assert _of_replica(number, tmp_path, llm, folder) == deployment
        assert config_problems(deployment) == []
        assert [model.url for model in deployment.models] == [None, f"llm-{number}.llm:8001"]
        assert deployment.on_llm_node(["llm"]).here == [1]


def test_a_pod_has_as_many_gpus_as_its_models_use(tmp_path: Path) -> None:
    deployment = _of_replica(0, tmp_path, _sets()["router"], BASE)
    assert _used(deployment) == {name: _gpus(pod) for name, pod in _sets().items()}


def test_a_group_of_nodes_has_as_many_gpus_as_its_model_uses(tmp_path: Path) -> None:
    group = group_of_nodes()
    leader, worker = pods(group)
    deployment = _of_replica(0, tmp_path, leader, GROUP)
    size = group["spec"]["leaderWorkerTemplate"]["size"]
    assert _used(deployment) == {
        "router": _gpus(_sets()["router"]),
        "llm": _gpus(leader) + (size - 1) * _gpus(worker),
    }
    container = leader["spec"]["containers"][0]
    assert container["env"] == [{"name": "GPUS", "value": str(_gpus(leader))}]  # of each node: the slots of mpirun
    assert "-np $((LWS_GROUP_SIZE * GPUS))" in container["args"][0] and _gpus(leader) == _gpus(worker)


def _used(deployment: Deployment) -> dict[str, int]:
    """GPUs, on a router and for an LLM."""
    places = {"router": deployment.here, "llm": deployment.on_llm_node(["llm"]).here}
    return {name: sum(_ranks(deployment.models[i].engine) for i in here) for name, here in places.items()}


def _ranks(engine: object) -> int:
    assert isinstance(engine, TensorRTLLMConfig)
    return engine.tensor_parallel


def test_the_deployment_of_the_image_is_sound() -> None:
    deployment = load_deployment(DOCKER / "deployment.yaml")
    assert config_problems(deployment) == []
    assert deployment.server.host == "0.0.0.0"
