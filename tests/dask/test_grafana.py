"""The Grafana dashboard of ``cluster/deploy``: it can be imported, and queries all exported metrics and no others."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster

from hpstage.cluster.dashboard.metrics import FAMILIES
from hpstage.store import MemoryJournal
from tests.dask.steady import Steady
from tests.dask.studies import search
from tests.dask.test_metrics import Samples, scrape

DASHBOARD = Path(__file__).parents[2] / "cluster/deploy/grafana.json"
_METRIC = re.compile(r"\bhpstage_[a-z_]+")


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return found


@pytest.fixture(scope="module")
def samples(cluster: LocalCluster, client: Client, tmp_path_factory: pytest.TempPathFactory) -> Samples:
    """What is exported when a search is over."""
    states = tmp_path_factory.mktemp("states")
    search(Steady(None), client, MemoryJournal(), states, name="drawn", n_trials=2)
    return scrape(cluster)


def shown(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def queries(dashboard: dict[str, Any]) -> list[str]:
    found = [target["expr"] for panel in shown(dashboard) for target in panel["targets"]]
    return found + [variable["definition"] for variable in dashboard["templating"]["list"]]


@pytest.mark.ci
def test_the_grafana_dashboard_queries_exactly_the_exported_metrics(
    dashboard: dict[str, Any], samples: Samples
) -> None:
    exported: dict[str, set[str]] = {}
    for name, labels in samples:
        exported.setdefault(name, set()).update(dict(labels))
    assert {name for query in queries(dashboard) for name in _METRIC.findall(query)} == exported.keys()
    for query in queries(dashboard):
        named = set(re.findall(r'([a-z]+)=~?"', query)) | {
            label.strip() for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(",")
        }
        for name in _METRIC.findall(query):
            assert named <= exported[name], query


@pytest.mark.ci
def test_states_and_legends_in_the_grafana_dashboard_are_exported_label_values(
    dashboard: dict[str, Any], samples: Samples
) -> None:
    values: dict[tuple[str, str], set[str]] = {}
    for name, labels in samples:
        for label, value in labels:
            values.setdefault((name, label), set()).add(value)
    for panel in shown(dashboard):
        for target in panel["targets"]:
            for name, wanted in re.findall(r'(hpstage_[a-z_]+)\{[^}]*state=~"([a-z|]+)"', target["expr"]):
                assert set(wanted.split("|")) <= values[name, "state"]
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                [name] = _METRIC.findall(target["expr"])
                assert label in FAMILIES[name.removesuffix("_total")][2]
                coloured = {override["matcher"]["options"] for override in panel["fieldConfig"].get("overrides", ())}
                if label not in ("study", "plan"):
                    assert coloured <= values[name, label]


def test_the_grafana_dashboard_can_be_imported(dashboard: dict[str, Any]) -> None:
    assert dashboard["id"] is None and dashboard["uid"] == "hpstage" and dashboard["schemaVersion"] >= 36
    [source] = dashboard["__inputs"]
    assert source["type"] == "datasource" and source["pluginId"] == "prometheus"
    for one in [*shown(dashboard), *dashboard["templating"]["list"]]:
        assert one["datasource"] == {"type": "prometheus", "uid": f"${{{source['name']}}}"}
    assert [variable["name"] for variable in dashboard["templating"]["list"]] == ["plan", "study"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_grafana_panels_have_units_and_descriptions_and_do_not_overlap(dashboard: dict[str, Any]) -> None:
    for panel in shown(dashboard):
        assert panel["title"] and panel["description"].endswith(".") and panel["fieldConfig"]["defaults"]["unit"]
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    assert all(place["x"] >= 0 and place["x"] + place["w"] <= 24 for place in places)
    for one, other in itertools.combinations(places, 2):
        apart = (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
        assert apart, (one, other)


def test_grafana_queries_take_rates_only_of_counters(dashboard: dict[str, Any]) -> None:
    for query in queries(dashboard):
        for name in re.findall(r"(?:rate|increase)\((hpstage_[a-z_]+)", query):
            assert FAMILIES[name.removesuffix("_total")][0].__name__ == "CounterMetricFamily" and name.endswith(
                "_total"
            )
