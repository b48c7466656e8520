"""The result of ``optimize``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any, SupportsIndex

from hpstage.accounting.audits import AuditReport, audits_of
from hpstage.accounting.savings import Savings
from hpstage.checkpoints import CheckpointStore
from hpstage.errors import UsageError
from hpstage.plan.facts import Fact, TrialId
from hpstage.plan.plan import SearchPlan
from hpstage.report.trial_log import TrialLog
from hpstage.schedule import Schedule
from hpstage.search.results.branching import RUNS, Lineage, together
from hpstage.search.results.loading import LoadedState
from hpstage.search.results.soup import Soup, soup_of
from hpstage.search.results.trial import Step, TrainedTrial, trial_of

if TYPE_CHECKING:
    from os import PathLike
    from pathlib import Path

    import optuna
    from distributed import Client
    from distributed.deploy import Cluster
    from optuna.trial import FrozenTrial

    from hpstage.accounting.book import Book
    from hpstage.executor import Executor
    from hpstage.optuna.ledger import Callback
    from hpstage.report.tree.embed import Tree
    from hpstage.report.tree.widget import BranchingTree


_BEST = 5
"""Number of best trials of a study with several objectives that a notebook shows."""


@dataclass(frozen=True, slots=True, repr=False)
class Result:
    """The outcome of a call of ``optimize``."""

    study: optuna.Study
    savings: Savings
    store: Path | None
    """The folder of the journal and checkpoints."""
    plan: SearchPlan
    """The search plan at the end of this call."""
    journal: Sequence[Fact]
    """The facts that the plan is folded from."""
    search: str = ""
    """The study's name in the plan, if it differs from its own."""
    checkpoints: CheckpointStore | None = None
    """The saved states; ``None`` if they were in a temporary folder."""
    trainable: object = None
    address: str = ""
    """The store's address for commands, without secrets; ``""`` if it was in memory."""
    lineage: Lineage | None = None
    """How to train further trials on the store."""

    def __repr__(self) -> str:
        trials = self.study.get_trials(deepcopy=False)
        best = [f", best_value={t.value:.6g}" for t in self.best_trials[:1] if len(self.study.directions) == 1]
        return (
            f"Result(study={self.study.study_name!r}, trials={len(trials)}{''.join(best)}, "
            f"merge_rate={self.savings.merge_rate:.2f}, store={self.address!r})"
        )

    @property
    def name(self) -> str:
        """The study's name in the plan."""
        return self.search or self.study.study_name

    def trial_id(self, number: int) -> TrialId:
        """Return a trial's id in the plan."""
        return TrialId(f"{self.name}/{number}")

    def write_report(self, folder: str | PathLike[str]) -> Path:
        """Write the report into a folder (created if needed) and return its first page."""
        from hpstage.report import write_report

        return write_report(folder, self)

    @property
    def audit(self) -> AuditReport:
        """The audits of all calls on this store: what was trained again and compared. See ``optimize(audit=...)``."""
        return audits_of(self.plan, self.journal)

    @property
    def best_trial(self) -> FrozenTrial:
        """The study's best trial; with several objectives, see :attr:`best_trials`."""
        return self.study.best_trial

    @property
    def best_trials(self) -> list[FrozenTrial]:
        """The Pareto front of a study with several objectives."""
        return self.study.best_trials

    def trial(self, trial: FrozenTrial | int | str) -> TrainedTrial:
        """Return a trial of the study as it was trained: its schedules, its metrics by step, and its saved states.

        Args:
            trial: a trial of the study, its number, or its id ``"<study>/<number>"``.

        Raises:
            UsageError: the trial is not on this plan.
        """
        if isinstance(trial, str):
            return trial_of(self.plan, self.checkpoints, TrialId(trial), lineage=self.lineage)
        number = index(trial) if isinstance(trial, SupportsIndex) else trial.number
        return trial_of(self.plan, self.checkpoints, self.trial_id(number), lineage=self.lineage)

    def branch(
        self,
        trial: FrozenTrial | int | str,
        at: int,
        changes: Mapping[str, Any] | None = None,
        *,
        steps: int | None = None,
        study: str = RUNS,
        executor: Executor | Client | Cluster | None = None,
        evaluate_every: int | None = None,
        callbacks: Sequence[Callback] | Callback | None = None,
        show_progress_bar: bool = False,
        **values: Any,
    ) -> TrainedTrial | list[TrainedTrial]:
        """Train a branch of a trial: its first ``at`` steps, and other values from there on; see
        :meth:`TrainedTrial.branch`."""
        return self.trial(trial).branch(
            at,
            together(changes, values),
            steps=steps,
            study=study,
            executor=executor,
            evaluate_every=evaluate_every,
            callbacks=callbacks,
            show_progress_bar=show_progress_bar,
        )

    def log(self, trial: FrozenTrial | int | str) -> TrialLog:
        """Return the log of a trial, its logged values and printed text; see :meth:`TrainedTrial.log`."""
        return self.trial(trial).log()

    def load(self, trial: FrozenTrial | int | str, step: Step = None, *, retrain: bool = False) -> LoadedState:
        """Load the model, optimizer and whatever else a trial has trained; see :meth:`TrainedTrial.load`.

        Args:
            step: after which step: a number, ``"best"`` for the best value of the study's metric on the way, or
                ``None`` for the last.
            retrain: if the state is not kept, train it again in this process.
        """
        return self.trial(trial).load(self.trainable, step, retrain=retrain)

    def best_model(self, *, retrain: bool = False) -> Any:
        """Return the model of the study's best trial after its last step, in evaluation mode if it has one.

        It is the model that was trained: if ``evaluate`` uses averaged weights, take those from :meth:`load`, as
        ``loaded.trainable.ema`` or, for a function, ``loaded.parts["ema"]``.

        Args:
            retrain: if the state is not kept, train it again in this process.

        Raises:
            UsageError: the study has several objectives, or the trial has no part ``"model"``.
        """
        if len(self.study.directions) > 1:
            raise UsageError("a study with several objectives has no best trial; load(result.best_trials[0]).model")
        model = self.load(self.study.best_trial, retrain=retrain).model
        return model.eval() if callable(getattr(model, "eval", None)) else model

    def soup(
        self, trials: Iterable[FrozenTrial | int | str | tuple[FrozenTrial | int | str, Step]], *, part: str = "model"
    ) -> Soup:
        """Average the weights of saved states, and evaluate the averaged model with the trainable.

        The means are computed in double precision, and do not depend on the order. Floating-point buffers are averaged
        as well: the running statistics of BatchNorm are means of statistics, not those of the averaged weights. If the
        model has such statistics, compute them with ``torch.optim.swa_utils.update_bn(batches, soup.model)``.
        Everything else is as in the state of the first member (by id and step). Nothing is trained, and nothing is
        written; see :meth:`Soup.save` and :meth:`Soup.save_weights`.

        Args:
            trials: trials, each after its last step, or pairs of a trial and a step: ``[3, 7]``, ``[(6, 400), (6,
                500)]``. Equal states of one trial count once.
            part: what is averaged; see :meth:`TrainedTrial.weights`.

        Raises:
            CheckpointMissing: a state is not kept.
            TrainingError: the trainable is a function that does not report metrics before its loop.
            UsageError: there are fewer than two states, or their weights have different names or shapes.
        """
        pairs = [given if isinstance(given, tuple) else (given, None) for given in trials]
        return soup_of([(self.trial(trial), step) for trial, step in pairs], self.trainable, part=part)

    def checkpoint(self, trial: FrozenTrial | int | str, step: Step = None) -> str:
        """Return the path or URL of a trial's checkpoint; see :meth:`TrainedTrial.checkpoint`."""
        return self.trial(trial).checkpoint(step)

    def schedules(self, trial: FrozenTrial | int | str) -> dict[str, Schedule]:
        """Return the schedules of a trial: a space that returns them retrains it bit for bit.

        Use this to replay a trial of population based training, whose parameters describe only its last segment.

        Raises:
            UsageError: the trial is not on this plan.
        """
        return self.trial(trial).schedules

    def tree(self) -> Tree:
        """Return the stage tree of the search, which a notebook shows: it can be searched and folded. Needs bokeh."""
        from hpstage.accounting.book import open_book
        from hpstage.report.tree.embed import Tree

        return Tree(open_book(self))

    def branching_tree(self, executor: Executor | Client | Cluster | None = None) -> BranchingTree:
        """Return the stage tree as a widget of a notebook: a click on a branch offers to train another one from there,
        with :meth:`branch`, in the kernel.

        Args:
            executor: where branches are trained, as for :meth:`branch`.

        Raises:
            UsageError: anywidget or bokeh is not installed.
        """
        from hpstage.accounting.book import open_book

        try:
            from hpstage.report.tree.widget import BranchingTree
        except ImportError:
            raise UsageError('the tree needs anywidget and bokeh: pip install "hpstage[notebooks]"') from None

        def train(trial: str, at: int, values: Mapping[str, Any]) -> str:
            trained = self.branch(trial, at, values, executor=executor)
            return "\n".join(f"Trained: {one}" for one in (trained if isinstance(trained, list) else [trained]))

        def reopen() -> Book:
            return open_book(self if self.lineage is None else self.lineage.store)

        return BranchingTree(open_book(self), train, reopen)

    def _repr_html_(self) -> str:
        """Return the HTML for a notebook: the best trials, and the cost of the search."""
        from jinja2 import Environment, PackageLoader

        metrics = self.plan.searches[self.name].started.metric
        ended = Counter(trial.state.name.lower() for trial in self.study.get_trials(deepcopy=False))
        best = self.best_trials[:_BEST] if ended["complete"] else []
        return (
            Environment(loader=PackageLoader("hpstage.search", "results"), autoescape=True, trim_blocks=True)
            .get_template("result.html")
            .render(
                name=self.study.study_name,
                states=", ".join(f"{count:,} {state}" for state, count in ended.items()),
                saved=self.savings,
                best=[
                    {"number": t.number, "values": list(zip(metrics, t.values, strict=True)), "params": t.params}
                    for t in best
                ],
                store=self.store,
            )
        )

    @property
    def best_value(self) -> float:
        """The metric of the best trial."""
        return self.study.best_value

    @property
    def best_params(self) -> dict[str, object]:
        """The parameters that the study's sampler suggested for the best trial."""
        return self.study.best_params
