"""Prometheus metrics on Dask's ``/metrics``: numbers of the plan, from a real scheduler and real searches."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import msgspec
import optuna
import pytest
from distributed import Client, LocalCluster
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import hpstage
from hpstage.accounting.account import new_account
from hpstage.accounting.branches import branches_of
from hpstage.cli.status import Status, status_of
from hpstage.cluster.dashboard import install
from hpstage.cluster.dashboard.follower import HANDLER, Follower
from hpstage.cluster.dashboard.metrics import FAMILIES
from hpstage.plan.facts import SearchEnded, SearchStarted
from hpstage.store import Journal, MemoryJournal, SQLiteJournal
from tests.dask.commands import until
from tests.dask.steady import Steady
from tests.dask.studies import Running, search
from tests.records import separated

pytestmark = pytest.mark.sampled(4)

ROOT = Path(__file__).parents[2]

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parsed(text: str) -> Samples:
    """Samples of ours by name and labels, none of them twice."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("hpstage_"):
                key = sample.name, tuple(sorted(sample.labels.items()))
                assert key not in found
                found[key] = sample.value
    return found


def scrape(cluster: LocalCluster) -> Samples:
    with urllib.request.urlopen(f"http://127.0.0.1:{cluster.scheduler.http_server.port}/metrics", timeout=30) as answer:
        return parsed(answer.read().decode())


def show(journal: Journal, client: Client) -> None:
    """Have the scheduler know all of it."""
    Follower(journal, lambda: client).close()


def one(samples: Samples, name: str, **labels: str) -> float:
    [value] = [
        value for (found, own), value in samples.items() if found == name and labels.items() <= dict(own).items()
    ]
    return value


def by(samples: Samples, name: str, label: str, **labels: str) -> dict[str, float]:
    """The values that are not zero, by one of the labels."""
    return {
        dict(own)[label]: value
        for (found, own), value in samples.items()
        if found == name and labels.items() <= dict(own).items() and value
    }


def status(journal: Journal) -> Status:
    account = new_account(journal)
    account.catch_up(journal)
    return status_of(account, journal)


def plan_label(samples: Samples, study: str) -> str:
    [plan] = {dict(own)["plan"] for _, own in samples if dict(own).get("study") == study}
    return plan


def check(samples: Samples, found: Status, study: str) -> None:
    """What is exported of a plan with this one study is what ``hpstage status --json`` says."""
    plan = plan_label(samples, study)
    expected = {
        "hpstage_plan_records_total": found.plan.records,
        "hpstage_plan_steps_asked_total": found.plan.steps_asked,
        "hpstage_plan_steps_distinct_total": found.plan.steps_unique,
        "hpstage_plan_steps_trained_total": found.plan.steps_trained,
        "hpstage_plan_steps_wasted_total": found.plan.steps_wasted,
        "hpstage_plan_merge_rate": found.plan.merge_rate,
        "hpstage_plan_checkpoints": found.plan.checkpoints,
        "hpstage_plan_checkpoint_bytes": found.plan.checkpoint_bytes,
        "hpstage_plan_drivers": 0,
    }
    assert {name: one(samples, name, plan=plan) for name in expected} == expected
    [own] = found.studies
    labels = {"plan": plan, "study": study}
    expected = {
        "hpstage_steps_asked_total": own.steps_asked,
        "hpstage_steps_distinct_total": own.steps_unique,
        "hpstage_steps_trained_total": found.plan.steps_trained,
        "hpstage_steps_wasted_total": found.plan.steps_wasted,
        "hpstage_merge_rate": own.merge_rate,
        "hpstage_training_workers": 0,
        "hpstage_study_drivers": 0,
    }
    assert {name: one(samples, name, **labels) for name in expected} == expected
    assert by(samples, "hpstage_trials", "state", **labels) == {
        state.lower(): count for state, count in own.trials.items()
    }
    assert one(samples, "hpstage_alone_worker_seconds", **labels) == pytest.approx(own.seconds_alone, abs=1e-3)
    assert one(samples, "hpstage_saved_worker_seconds", **labels) == pytest.approx(own.seconds_saved, abs=1e-3)
    for name, these in (
        ("hpstage_worker_seconds_total", labels),
        ("hpstage_plan_worker_seconds_total", {"plan": plan}),
    ):
        spent = by(samples, name, "activity", **these)
        assert sum(spent.values()) == pytest.approx(found.plan.seconds_used, abs=1e-3)
        assert {"train", "evaluate", "save"} <= spent.keys()


@pytest.mark.ci
def test_prometheus_metrics_equal_the_figures_of_hpstage_status(
    cluster: LocalCluster, client: Client, tmp_path: Path
) -> None:
    journal = MemoryJournal()
    result = search(Steady(tmp_path, 0.002), client, journal, tmp_path / "states", name="exported")
    samples = scrape(cluster)
    check(samples, status(journal), "exported")
    states = by(samples, "hpstage_stages", "state", study="exported")
    assert states == {"done": len(branches_of(result.plan.trials))}
    workers = by(samples, "hpstage_scheduler_workers", "state", scheduler=cluster.scheduler_address)
    assert workers == {"idle": 2}


def test_every_metric_family_is_exported_after_a_small_search(cluster: LocalCluster, client: Client) -> None:
    journal = MemoryJournal()
    search(Steady(None), hpstage.InlineExecutor(), journal, name="all", n_trials=4)
    show(journal, client)
    assert {name.removesuffix("_total") for name, _ in scrape(cluster)} == set(FAMILIES)


def test_metric_names_and_help_texts_follow_the_prometheus_conventions() -> None:
    for name, (kind, text, labels) in FAMILIES.items():
        assert re.fullmatch(r"hpstage_[a-z]+(_[a-z]+)*", name) and not name.endswith("_total")
        assert text.endswith(".") and len(text) > 10
        assert all(re.fullmatch("[a-z]+", label) for label in labels)
        assert ("seconds" not in name or name.endswith("_seconds")) and ("bytes" not in name or name.endswith("_bytes"))
        assert kind.__name__ in ("CounterMetricFamily", "GaugeMetricFamily")


@pytest.mark.parametrize("name", ['<script>alert("1")</script> $x_{', 'a "quote", a \\ and a\nline', "Žluťoučký 😀"])
def test_a_study_name_is_exported_unchanged_as_a_label(cluster: LocalCluster, client: Client, name: str) -> None:
    journal = MemoryJournal()
    search(Steady(None), hpstage.InlineExecutor(), journal, name=name, n_trials=2)
    show(journal, client)
    assert one(scrape(cluster), "hpstage_steps_asked_total", study=name) > 0


def test_metrics_count_the_workers_that_train_for_a_study(
    cluster: LocalCluster, client: Client, tmp_path: Path
) -> None:
    running = Running(Steady(tmp_path, 0.05), client, tmp_path)

    def both_train() -> bool:
        samples = scrape(cluster)
        return by(samples, "hpstage_training_workers", "study").get("study") == 2 and by(
            samples, "hpstage_scheduler_workers", "state", scheduler=cluster.scheduler_address
        ) == {"busy": 2}

    until(both_train, "both workers train")
    samples = scrape(cluster)
    plans = {plan for plan, count in by(samples, "hpstage_study_drivers", "plan", study="study").items() if count}
    assert len(plans) == 1
    assert by(samples, "hpstage_stages", "state", plan=plans.pop()).keys() & {"running", "waiting", "ready"}
    running.result()
    assert by(scrape(cluster), "hpstage_training_workers", "study") == {}


@pytest.mark.ci
def test_counters_never_decrease_while_drivers_are_killed_and_restarted(
    nannies: LocalCluster, client_of_nannies: Client, tmp_path: Path
) -> None:
    client_of_nannies.wait_for_workers(2, timeout=120)
    install(client_of_nannies)
    last: Samples = {}

    def look() -> Samples:
        nonlocal last
        now = scrape(nannies)
        plans = {dict(labels).get("plan") for _, labels in now if dict(labels).get("study") == "again"}
        for (name, labels), value in last.items():
            if name.endswith("_total") and dict(labels).get("plan") in plans:  # old ones of others are forgotten
                assert now[name, labels] >= value, (name, labels)
        last = now
        return now

    def drive() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.dask.studies", nannies.scheduler_address, str(tmp_path), "again", "7",
             "0.2"],
            cwd=ROOT,
        )  # fmt: skip

    def trained() -> float:
        return sum(by(look(), "hpstage_steps_trained_total", "plan", study="again").values())

    first = drive()
    until(lambda: trained() > 10, "the first driver's workers train")
    before = trained()
    first.send_signal(signal.SIGKILL)
    first.wait()
    second = drive()
    until(lambda: trained() >= before and second.poll() is not None, "the second driver ends")
    assert second.returncode == 0
    samples = look()
    [plan] = by(samples, "hpstage_steps_trained_total", "plan", study="again")
    assert trained() >= before
    assert one(samples, "hpstage_plan_drivers_lost_total", plan=plan) == 1
    journal = SQLiteJournal(tmp_path / "plan" / "plan.sqlite", read_only=True)
    found = status(journal)
    journal.close()
    for name, expected in (
        ("records_total", found.plan.records),
        ("steps_asked_total", found.plan.steps_asked),
        ("steps_distinct_total", found.plan.steps_unique),
        ("steps_trained_total", found.plan.steps_trained),
        ("checkpoints", found.plan.checkpoints),
    ):
        assert one(samples, f"hpstage_plan_{name}", plan=plan) == expected
    assert len(found.studies) == 2 and found.plan.steps_trained > before


def test_schedulers_in_one_process_export_separate_metrics_until_they_close() -> None:
    journal = MemoryJournal()
    search(Steady(None), hpstage.InlineExecutor(), journal)
    records = journal.read()

    def ours() -> set[str]:
        return {dict(own)["scheduler"] for _, own in parsed(generate_latest().decode()) if "scheduler" in dict(own)}

    before = ours()
    for _ in range(2):
        with (
            LocalCluster(n_workers=0, processes=False, dashboard_address="127.0.0.1:0") as one_cluster,
            LocalCluster(n_workers=0, processes=False, dashboard_address="127.0.0.1:0") as other,
        ):
            for number, cluster in enumerate((one_cluster, other)):
                with Client(cluster, set_as_default=False) as client:
                    assert install(client)
                offer = cluster.scheduler.handlers[HANDLER]
                # Both know the plan, one of them not yet all of it.
                assert offer(plan="shared", first=0, records=records[: len(records) - 3 * number])
            for cluster in (one_cluster, other):
                samples = scrape(cluster)
                assert one(samples, "hpstage_plan_records_total", plan="shared") == len(records)
            assert ours() - before == {one_cluster.scheduler_address, other.scheduler_address}
        assert ours() == before
        assert not by(parsed(generate_latest().decode()), "hpstage_plan_records_total", "plan", plan="shared")


def test_metrics_of_old_ended_studies_are_dropped_and_those_of_running_studies_kept(
    cluster: LocalCluster, client: Client, tmp_path: Path
) -> None:
    journal = MemoryJournal()
    search(Steady(None), hpstage.InlineExecutor(), journal, n_trials=2)
    records = separated(journal).read()
    for number in range(200):
        name = f"late {number}"
        records += map(
            msgspec.json.encode,
            [SearchStarted(name, "a", ("m",), 1, None, "s", at=1e12 + number), SearchEnded(name, at=1e12 + number)],
        )

    def studies() -> set[str]:
        return set(by(scrape(cluster), "hpstage_merge_rate", "study")) & {"study", *(f"late {i}" for i in range(200))}

    offer = cluster.scheduler.handlers[HANDLER]
    offer(plan="many", first=0, records=records[:-1])
    offer(plan="many", first=len(records) - 1, records=records[-1:])
    try:
        assert studies() == {f"late {number}" for number in range(150, 200)}
        # A driver that has not left is at work on the first study.
        [driver] = [i for i, record in enumerate(records) if b"DriverLeft" in record]
        offer(plan="driven", first=0, records=records[:driver] + records[driver + 1 : -1])
        offer(plan="driven", first=len(records) - 2, records=records[-1:])
        assert "study" in studies()
    finally:
        for plan in ("many", "driven"):
            del cluster.scheduler.handlers[HANDLER].__self__.plans[plan]


@pytest.mark.ci
def test_a_plan_that_is_sent_in_pieces_is_exported_only_when_complete(cluster: LocalCluster, client: Client) -> None:
    journal = MemoryJournal()
    search(Steady(None), hpstage.InlineExecutor(), journal, n_trials=40)
    records = separated(journal).read()
    offer = cluster.scheduler.handlers[HANDLER]
    try:
        offer(plan="half", first=0, records=records[:200])
        assert "half" not in by(scrape(cluster), "hpstage_plan_records_total", "plan")
        offer(plan="half", first=200, records=records[200:])
        assert one(scrape(cluster), "hpstage_plan_records_total", plan="half") == len(records)
        offer(plan="half", first=len(records), records=[b"nonsense"])
        assert "half" not in by(scrape(cluster), "hpstage_plan_records_total", "plan")
    finally:
        del cluster.scheduler.handlers[HANDLER].__self__.plans["half"]


def calls_of_a_scrape(plan: str, cluster: LocalCluster, records: list[bytes]) -> int:
    offer = cluster.scheduler.handlers[HANDLER]
    offer(plan=plan, first=0, records=records[:-1])
    offer(plan=plan, first=len(records) - 1, records=records[-1:])
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        text = generate_latest(REGISTRY)
    finally:
        sys.setprofile(None)
        del cluster.scheduler.handlers[HANDLER].__self__.plans[plan]
    assert plan.encode() in text
    return calls


def test_the_cost_of_a_scrape_does_not_grow_with_the_size_of_the_plan(cluster: LocalCluster, client: Client) -> None:
    found = []
    for n_trials in (3, 90):
        journal = MemoryJournal()
        study = optuna.create_study(study_name="study", sampler=optuna.samplers.RandomSampler(seed=0))
        hpstage.optimize(
            study, Steady(None), lambda trial: {"a": trial.suggest_float("a", 0, 1)}, metric="score", steps=2,
            n_trials=n_trials, store=journal, executor=hpstage.InlineExecutor(),
        )  # fmt: skip
        found.append(calls_of_a_scrape("sized", cluster, journal.read()))
    # Dask's own collectors and the collection of garbage vary by a few calls.
    assert found[1] < 1.1 * found[0]


WITHOUT_BOKEH = """
import sys
sys.modules["bokeh"] = None
import urllib.request
from pathlib import Path
from distributed import Client
from hpstage.cluster import local_cluster
from hpstage.store import MemoryJournal
from tests.dask.steady import Steady
from tests.dask.studies import search
if __name__ == "__main__":
    with local_cluster(1, gpus=0) as cluster, Client(cluster) as client:
        result = search(Steady(None), client, MemoryJournal(), Path(sys.argv[1]), name="bare", n_trials=4)
        place = f"http://127.0.0.1:{cluster.scheduler.http_server.port}/metrics"
        text = urllib.request.urlopen(place).read().decode()
        print(result.savings.steps_trained)
        print([line for line in text.splitlines() if line.startswith("hpstage_steps_trained_total")])
"""


def test_metrics_are_exported_without_bokeh(tmp_path: Path) -> None:
    script = tmp_path / "bare.py"
    script.write_text(WITHOUT_BOKEH)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script), str(tmp_path / "states")],
        capture_output=True, text=True, timeout=100, check=False, cwd=ROOT, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    trained, line = done.stdout.splitlines()[-2:]
    assert 'study="bare"' in line and line.endswith(f"{float(trained)}']") and "Error" not in done.stderr


def environment() -> Mapping[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
