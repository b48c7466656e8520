"""Plots for optuna-dashboard, saved with the study."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpstage.accounting.book import open_book
from hpstage.errors import UsageError
from hpstage.report.tree.for_plotly import plotly_stage_tree

if TYPE_CHECKING:
    from hpstage.search.results.result import Result

STAGE_TREE = "hpstage-stage-tree"
"""Id of the plot within the study; saving it again replaces it."""


def save_stage_tree(result: Result) -> None:
    """Save the stage tree with the study of a search, for optuna-dashboard to show on the study's page.

    Can be called again after a further search: the plot is replaced. Needs optuna-dashboard and plotly (``pip install
    "hpstage[optuna-dashboard]"``).

    Raises:
        UsageError: optuna-dashboard or plotly is not installed.
    """
    try:
        import plotly  # noqa: F401  only to check that it is installed
        from optuna_dashboard import save_plotly_graph_object
    except ImportError as error:
        raise UsageError(
            f'{error.name} is not installed: pip install "hpstage[optuna-dashboard]", and save the plot again'
        ) from None
    save_plotly_graph_object(result.study, plotly_stage_tree(open_book(result)), graph_object_id=STAGE_TREE)
