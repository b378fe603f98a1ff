"""The manifests for Kubernetes fit each other, the Kubernetes API and this package."""

import os
import pathlib
import re

import keras
import pytest

from keras_strategy.cluster import process_exit, rendezvous
from keras_strategy.cluster_resolver import detect, kubernetes

yaml = pytest.importorskip("yaml")
client = pytest.importorskip("kubernetes.client")

pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="the same on every backend"
)
ROOT = pathlib.Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "kubernetes.md").read_text()
DOCUMENTS = [
    document
    for path in sorted((ROOT / "docs" / "manifests").glob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
]
LABELS = {"app": "digits"}


def of_kind(kind):
    return [document for document in DOCUMENTS if document["kind"] == kind]


def find_replicated_job(document):
    (job,) = document["spec"]["replicatedJobs"]
    return f"{document['metadata']['name']}-{job['name']}-0", job["template"]["spec"]


def list_jobs():
    """Return the name that each job gets, and its specification."""
    (job,), (jobset,) = of_kind("Job"), of_kind("JobSet")
    (runtime,), (trainjob,) = of_kind("TrainingRuntime"), of_kind("TrainJob")
    assert trainjob["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    # As Kubeflow Trainer does.
    name, spec = find_replicated_job(
        {"metadata": trainjob["metadata"], **runtime["spec"]["template"]}
    )
    trainer = trainjob["spec"]["trainer"]
    spec["completions"] = spec["parallelism"] = trainer["numNodes"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "node"
    container["env"] += trainer["env"]
    pod["subdomain"] = trainjob["metadata"]["name"]
    set_name, set_spec = find_replicated_job(jobset)
    set_spec["template"]["spec"]["subdomain"] = jobset["metadata"]["name"]
    return {
        "Job": (job["metadata"]["name"], job["spec"]),
        "JobSet": (set_name, set_spec),
        "TrainJob": (name, spec),
    }


JOBS = list_jobs()
EACH_JOB = pytest.mark.parametrize("name, spec", JOBS.values(), ids=JOBS)


def find_unknown_fields(value, kind):
    """List the fields that the Kubernetes API does not have."""
    listed = re.fullmatch(r"list\[(\w+)\]", kind)
    if listed:
        return [f for each in value for f in find_unknown_fields(each, listed[1])]
    model = getattr(client, kind, None)
    if model is None:
        return []
    names = {theirs: ours for ours, theirs in model.attribute_map.items()}
    unknown = [f"{kind}.{field}" for field in value if field not in names]
    for field in set(value) & set(names):
        unknown += find_unknown_fields(value[field], model.openapi_types[names[field]])
    return unknown


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda each: each["kind"])
def test_fields_are_of_the_api(document):
    model = f"V1{document['kind']}"
    if hasattr(client, model):
        assert find_unknown_fields(document, model) == []


@EACH_JOB
def test_fields_of_jobs_are_of_the_api(name, spec):
    assert find_unknown_fields(spec, "V1JobSpec") == []


def test_unknown_fields_are_found():
    assert find_unknown_fields({"spec": {"tpyo": 1}}, "V1Job") == ["V1JobSpec.tpyo"]


@EACH_JOB
def test_selectors_match_the_labels(name, spec):
    assert LABELS.items() <= spec["template"]["metadata"]["labels"].items()
    (policy,), (service,) = of_kind("NetworkPolicy"), of_kind("Service")
    (rule,) = policy["spec"]["ingress"]
    allowed = [each["podSelector"]["matchLabels"] for each in rule["from"]]
    assert [policy["spec"]["podSelector"]["matchLabels"], *allowed] == [LABELS] * 2
    assert service["spec"]["selector"] == LABELS


@EACH_JOB
def test_pods_find_each_other(name, spec, monkeypatch):
    for variable in [n for n in os.environ if n.startswith(("TF_CONFIG", "TPU_"))]:
        monkeypatch.delenv(variable)
    pod = spec["template"]["spec"]
    for index in range(spec["completions"]):
        for entry in pod["containers"][0]["env"]:
            source = entry.get("valueFrom", {})
            if "fieldRef" in source:
                assert kubernetes._INDEX_ANNOTATION in source["fieldRef"]["fieldPath"]
                entry = {**entry, "value": str(index)}
            monkeypatch.setenv(entry["name"], entry.get("value", "secret"))
        resolver = detect().resolver()
        tasks = resolver.cluster_spec().job_tasks("worker")
        assert (resolver.task_id, len(tasks)) == (index, spec["parallelism"])
        # Kubernetes makes the host name of a pod from the job's name and the index.
        assert tasks[0].partition(":")[0] == f"{name}-0.{pod['subdomain']}"


def test_headless_service_has_the_subdomain():
    (service,) = of_kind("Service")
    assert (
        service["metadata"]["name"] == JOBS["Job"][1]["template"]["spec"]["subdomain"]
    )
    assert service["spec"]["clusterIP"] == "None"


@EACH_JOB
def test_failure_policy_has_the_exit_codes(name, spec):
    actions = {
        code: rule["action"]
        for rule in spec["podFailurePolicy"]["rules"]
        for code in rule.get("onExitCodes", {}).get("values", ())
    }
    expected = {process_exit.EXIT_PREEMPTED: "FailJob"}
    if spec["backoffLimit"]:  # its pods are replaced one by one
        expected = dict.fromkeys(
            (process_exit.EXIT_PREEMPTED, process_exit.EXIT_OTHER_WORKER_FAILED),
            "Ignore",
        )
    assert actions == expected
    assert spec["template"]["spec"]["restartPolicy"] == "Never"  # the policy needs it


@EACH_JOB
def test_volumes_and_secret_exist(name, spec):
    pod = spec["template"]["spec"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    (container,) = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
    (claim,) = of_kind("PersistentVolumeClaim")
    claimed = volumes["data"]["persistentVolumeClaim"]["claimName"]
    assert claimed == claim["metadata"]["name"]
    (secret,) = [
        entry
        for entry in container["env"]
        if entry["name"] == rendezvous.SECRET_VARIABLE
    ]
    found = secret["valueFrom"]["secretKeyRef"]
    command = f"kubectl create secret generic {found['name']}"
    assert command in PAGE and f"--from-literal={found['key']}=" in PAGE


def test_role_allows_what_the_resolver_needs():
    (role,), (binding,) = of_kind("Role"), of_kind("RoleBinding")
    (account,) = of_kind("ServiceAccount")
    assert role["rules"] == [yaml.safe_load(kubernetes._RBAC_RULE)]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    (subject,) = binding["subjects"]
    assert subject["name"] == account["metadata"]["name"]
