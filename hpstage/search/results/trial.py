"""TrainedTrial: a trial on a plan, and its saved states."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import index
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex

from hpstage.checkpoints import CheckpointStore
from hpstage.errors import CheckpointCorrupt, CheckpointMissing, UsageError
from hpstage.errors.arguments import shown, whole
from hpstage.errors.text import count_of
from hpstage.plan.facts import SearchStarted, TrialId
from hpstage.plan.nodes import PlannedTrial, State
from hpstage.plan.plan import SearchPlan
from hpstage.plan.winners import best_state
from hpstage.report.trial_log import TrialLog, log_of
from hpstage.schedule import Scalar, Schedule
from hpstage.search.results.branching import RUNS, Lineage, branches, check_names, together, until
from hpstage.search.results.diff import TrialDiff, diff_of, names_in
from hpstage.search.results.loading import LoadedState, load, weights_of, write_weights
from hpstage.search.results.microanneal import MicroAnneals, decays

if TYPE_CHECKING:
    from distributed import Client
    from distributed.deploy import Cluster
    from torch import Tensor

    from hpstage.executor import Executor
    from hpstage.optuna.ledger import Callback

logger = logging.getLogger("hpstage")

_IN_TEMPORARY_FOLDER = (
    "the checkpoints of this search were in a temporary folder, which is gone: give optimize() a folder or URL with "
    "store= or checkpoints="
)

Step = int | Literal["best"] | None
"""Which state of a trial: that after a number of steps; the one with the best value of the study's metric; or, with
``None``, the last one that was evaluated."""


@dataclass(frozen=True, slots=True, repr=False)
class TrainedTrial:
    """A trial on a plan: its schedules, metrics and saved states. Read-only."""

    planned: PlannedTrial
    plan: SearchPlan
    checkpoints: CheckpointStore | None
    """``None`` if they were in a temporary folder, which is gone."""
    lineage: Lineage | None = None
    """How to train further trials on the same store."""

    def __repr__(self) -> str:
        return f"TrainedTrial({self.id!r}, steps={self.planned.requested}, kept={self.kept})"

    @property
    def id(self) -> TrialId:
        """``"<study>/<number>"``."""
        return self.planned.id

    @property
    def study(self) -> str:
        """The name of the trial's study in the plan."""
        return self.plan.study_of(self.id)

    @property
    def schedules(self) -> dict[str, Schedule]:
        """The trial's hyperparameters: a space that returns them retrains the trial bit for bit."""
        return dict(self.planned.schedules)

    def then(self, after: Mapping[str, Schedule | Scalar], *, at: int | None = None) -> dict[str, Schedule]:
        """Return the trial's hyperparameters with other values after ``at`` steps, for a space that continues it.

        Args:
            after: by name, the values from there on; steps of schedules count from there. Hyperparameters that are not
                named keep their schedules, and beyond the trial's end their last values.
            at: number of steps before the change; by default all steps of the trial.

        Raises:
            UsageError: the trial has no such step or hyperparameter; the message lists those it has.
        """
        own, steps = self.schedules, self.planned.steps
        at = steps if at is None else whole(0, steps).of("at", at)
        check_names(self.planned, own, after, at)
        kept = {name: until(self.planned, self.plan, name, at if name in after else steps) for name in own}
        return {
            name: schedule.then(after[name] if name in after else own[name].value(steps - 1))
            for name, schedule in kept.items()
        }

    def branch(
        self,
        at: int,
        changes: Mapping[str, Any] | None = None,
        *,
        steps: int | None = None,
        trainable: object = None,
        study: str = RUNS,
        executor: Executor | Client | Cluster | None = None,
        evaluate_every: int | None = None,
        callbacks: Sequence[Callback] | Callback | None = None,
        show_progress_bar: bool = False,
        **values: Any,
    ) -> TrainedTrial | list[TrainedTrial]:
        """Train a branch: the trial's first ``at`` steps, which are not trained again, and other values from there on.

        ::

            trial.branch(at=20, lr=0.03)
            trial.branch(at=20, lr=[0.03, s.cosine(0.03, T_max=40)], batch_size=256)  # two branches

        A branch is a trial of the study ``"runs"`` on the same store; its user attribute ``hpstage:branch_of`` names
        the trial that it branches from. It equals, bit for bit, a trial that was trained with these values from its
        first step. The same call made again continues an interrupted branch or returns a finished one. If there is no
        checkpoint at ``at``, the steps from the last checkpoint before it are trained, and a warning gives their number
        first.

        Args:
            at: number of steps that the trial and its branch have in common, from 0 to the trial's number of steps.
            changes: values by name, for names that cannot be keywords or that are parameters of this method.
            steps: the branch's number of steps; by default, the trial's. Hyperparameters that are not named keep their
                schedules, and beyond the trial's end their last values; metrics continue to decide ``s.plateau``.
            trainable: the training code, for a trial of :func:`hpstage.open`.
            study, executor, evaluate_every, callbacks, show_progress_bar: as for :func:`hpstage.train`.
            values: schedules, whose steps count from ``at``, or plain values. A list stands for several of them: one
                branch is trained for each combination.

        Returns:
            The branch; a list of them if a value is a list.

        Raises:
            UsageError: the trial has no such step or hyperparameter, failed before it, metrics have not decided the
                hyperparameter that far, or the code reads it at step 0 only. The other errors are those of
                :func:`hpstage.train`.
        """
        subject, given = self._lineage().of(trainable), together(changes, values)
        trained = self._train(
            subject,
            branches(self.planned, self.plan, at, given, steps, subject),
            study=study,
            executor=executor,
            evaluate_every=evaluate_every,
            callbacks=callbacks,
            show_progress_bar=show_progress_bar,
        )
        return trained if any(isinstance(value, list | tuple) for value in given.values()) else trained[0]

    def extend(
        self,
        steps: int,
        changes: Mapping[str, Any] | None = None,
        *,
        trainable: object = None,
        study: str = RUNS,
        executor: Executor | Client | Cluster | None = None,
        evaluate_every: int | None = None,
        callbacks: Sequence[Callback] | Callback | None = None,
        show_progress_bar: bool = False,
        **values: Any,
    ) -> TrainedTrial | list[TrainedTrial]:
        """Train the trial to more steps, as a branch at its end. Hyperparameters that are not named keep their last
        values.

        The arguments are those of :meth:`branch`.
        """
        if whole().of("steps", steps) <= self.planned.steps:
            raise UsageError(f"trial {self.id} has {self.planned.steps} steps already; give more, or branch it before")
        return self.branch(
            self.planned.steps,
            together(changes, values),
            steps=steps,
            trainable=trainable,
            study=study,
            executor=executor,
            evaluate_every=evaluate_every,
            callbacks=callbacks,
            show_progress_bar=show_progress_bar,
        )

    def microanneal(
        self,
        mixtures: Mapping[str, Mapping[str, float]],
        *,
        control: str,
        at: int,
        steps: int,
        seeds: int | Sequence[int] = 3,
        trainable: object = None,
        study: str = RUNS,
        executor: Executor | Client | Cluster | None = None,
        show_progress_bar: bool = False,
        **values: Any,
    ) -> MicroAnneals[TrainedTrial]:
        """Train short decays from one state of this trial over mixtures of data, and compare them with a control.

        ::

            found = trunk.microanneal(
                {"as before": {"prose": 0.9, "code": 0.1}, "more code": {"prose": 0.5, "code": 0.5}},
                control="as before", at=1000, steps=100,
            )
            print(found)  # a table of differences from the control

        For each mixture and each seed, a branch at ``at`` is trained (see :meth:`branch`) with the mixture's weights in
        an :class:`hpstage.torch.Mixture`. Up to ``at``, all branches have the trial's own seed; from there on, each
        branch's own seed decides the order of samples and the randomness.

        Args:
            mixtures: the weights by mixture and source; a source that is not named has weight 0.
            control: the mixture that the others are compared with.
            at: number of steps of the trial that the branches have in common.
            steps: number of steps of each decay.
            seeds: the seeds, or their number; they then count up from the trial's own.
            values: what else changes at ``at``, as for :meth:`branch`; by default, ``lr`` (or ``learning_rate``) falls
                linearly from its value there to 0.
            trainable, study, executor, show_progress_bar: as for :meth:`branch`.

        Raises:
            UsageError: the trial lacks ``seed``, ``lr`` or a weight, or ``control`` is not one of the mixtures. Other
                errors are those of :meth:`branch`.
        """
        subject, steps = self._lineage().of(trainable), whole().of("steps", steps)
        changes = decays(self.planned, mixtures, control, at, steps, seeds, values)
        groups = [branches(self.planned, self.plan, at, one, at + steps, subject) for one in changes.values()]
        each = iter(
            self._train(
                subject,
                [one for group in groups for one in group],
                study=study,
                executor=executor,
                show_progress_bar=show_progress_bar,
            )
        )
        return MicroAnneals(
            {name: list(islice(each, len(one))) for name, one in zip(changes, groups, strict=True)}, control
        )

    def _train(self, subject: object, configurations: Sequence[Any], **options: Any) -> list[TrainedTrial]:
        """Train branches of the trial on its store, with the metrics of its study."""
        lineage, record = self._lineage(), self.plan.searches[self.study].started
        trained: list[TrainedTrial] = lineage.train(
            subject,
            configurations,
            metrics=record.metric,
            directions=record.directions,
            store=lineage.store,
            checkpoints=lineage.checkpoints,
            **options,
        )
        return trained

    def diff(self, other: TrainedTrial) -> TrialDiff:
        """Return the known differences from another trial: the step at which they diverge, schedules and metrics."""
        if not isinstance(other, TrainedTrial):
            raise UsageError(f"other is {shown(other)}; give a trial, such as result.trial(3)")
        return diff_of(self.planned, other.planned, names_in(self.checkpoints))

    def _lineage(self) -> Lineage:
        if self.lineage is None:
            raise UsageError(
                f"trial {self.id} was opened only for reading and cannot be branched; get it from hpstage.open(store), "
                f"or from a search's result"
            )
        return self.lineage

    @property
    def metrics(self) -> dict[int, dict[str, float]]:
        """All known metrics by step, including those that only another trial on the same branch has requested."""
        return {step: dict(state.metrics) for step, state in self._states().items() if state.metrics is not None}

    @property
    def kept(self) -> list[int]:
        """The steps after which a state is kept."""
        if self.checkpoints is None:
            return []
        return [step for step, state in self._states().items() if state.kept is not None]

    def hyperparameters(self, step: int) -> dict[str, Scalar]:
        """Return the values in step ``step``, counted from 0."""
        return {name: schedule.value(step) for name, schedule in self.planned.schedules.items()}

    def step(self, step: Step = None) -> int:
        """Return the number of steps that ``step`` stands for.

        Raises:
            UsageError: the trial has no such step, or no metrics yet; for ``"best"``, if its study has more than one
                objective.
        """
        if isinstance(step, SupportsIndex) and not isinstance(step, bool):
            step = index(step)
            if not 1 <= step <= self.planned.requested:
                last = self.planned.requested
                raise UsageError(f"trial {self.id} has no state after step {step}: it has {last} steps")
            return step
        if step is not None and step != "best":
            raise UsageError(f"step is {shown(step)}; give a number of steps, 'best', or None for the last")
        metrics = self.metrics
        if step is None:
            if not metrics:
                raise UsageError(f"trial {self.id} has no metrics; give the step of a saved state: {self.kept}")
            return max(metrics)
        search = self._search()
        found = best_state(self.planned, search)
        if found is None:
            raise UsageError(f"trial {self.id} has no value of {search.metric[0]!r}")
        return found[1]

    def checkpoint(self, step: Step = None) -> str:
        """Return the path or URL of a state's checkpoint: a folder with ``state.safetensors`` and its description.
        Tensors that it shares with other checkpoints are elsewhere in the store; :meth:`weights` returns all tensors.

        Raises:
            CheckpointMissing: no checkpoint is kept there.
            CheckpointUnreachable: a small checkpoint shares a file with others, and a folder for it cannot be written.
        """
        checkpoints, state = self._find(self.step(step))
        assert state.kept is not None
        return checkpoints.unpack(state.kept.key)

    def state(self, step: Step = None) -> Any:
        """Return a saved state: for a ``TorchTrainable`` or a function, everything that training had changed; for an
        object with five methods, the result of its ``state_dict()``. Raises as :meth:`checkpoint` does."""
        at = self.step(step)
        checkpoints, state = self._find(at)
        assert state.kept is not None
        try:
            return checkpoints.load(state.kept.key)
        except (CheckpointMissing, CheckpointCorrupt) as error:
            raise type(error)(
                f"the checkpoint of trial {self.id} after step {at} cannot be read: {error}. load(..., retrain=True) "
                f"trains it again from an earlier one"
            ) from error

    def log(self) -> TrialLog:
        """Return the log of the trial, its logged values and printed text: the logs of its stages, end to end.

        Raises:
            CheckpointMissing: the checkpoints, and the logs next to them, were in a temporary folder.
        """
        if self.checkpoints is None:
            raise CheckpointMissing(_IN_TEMPORARY_FOLDER)
        return log_of(self.plan, self.checkpoints, self.planned)

    def weights(self, step: Step = None, *, part: str | None = None) -> dict[str, Tensor]:
        """Return the tensors of a model by their names in its ``state_dict()``, without the code that trained it.

        These are the tensors in the saved state. A tensor with two names is there only once, and a tensor that existed
        before the trial and was not changed by training (a frozen backbone loaded in ``__init__``) not at all; buffers
        are there even if they are not persistent. For exactly the ``state_dict()``, take that of :meth:`load`'s model.

        Args:
            part: what to return: ``"self.ema"``, for example, for averaged weights that the trainable keeps. By default
                ``"model"``, or everything if there is no model.

        Raises:
            CheckpointMissing: no checkpoint is kept there.
            UsageError: the state has no tensors of that name; the message lists the names that it has.
        """
        return weights_of(self.state(step), part, str(self.id))

    def save_weights(self, path: str | os.PathLike[str], step: Step = None, *, part: str | None = None) -> None:
        """Write :meth:`weights` into a file that safetensors reads, with the trial, step and metrics as its metadata.

        Its folder is made if needed. Raises as :meth:`weights` does, and ``OSError``.
        """
        at = self.step(step)
        about = {"trial": str(self.id), "step": str(at), "part": part or ""}
        write_weights(path, self.weights(at, part=part), about, self.metrics.get(at, {}))

    def load(self, trainable: object, step: Step = None, *, retrain: bool = False) -> LoadedState:
        """Load a state into new objects, built by the code of ``trainable``.

        The objects belong to the caller: a copy of ``trainable`` builds them, on the device on which it would train in
        this process. ``trainable`` itself, and the generators and threads of the process, stay as they were. It is
        checked that the state fits ``trainable``, but not that ``trainable`` is the code that was trained.

        Args:
            trainable: the one that was trained, or another one that builds the same model.
            retrain: if the state is not kept, train the steps since the last checkpoint again, in this process.

        Raises:
            CheckpointMissing: no checkpoint is kept there, and ``retrain`` is not set.
            StateError: the state belongs to other code.
        """
        at = self.step(step)
        start, source = self._from(at, retrain)
        key = self.plan.key(self.planned.node_at(start), start) if start else None
        return load(
            trainable,
            source,
            start=start,
            stop=at,
            values=self.hyperparameters,
            trial=self.id,
            name=f"state {key} of the store, of trial {self.id} after step {start},",
            metrics=self.metrics.get(at),
        )

    def _states(self) -> dict[int, State]:
        """Return the states on the trial's path, by step, up to the last requested one."""
        return {state.step: state for state in self.planned.states() if state.step <= self.planned.requested}

    def _from(self, step: int, retrain: bool) -> tuple[int, Any]:
        """Return the state to load, and its step: with ``retrain`` the last one that can be read, or the beginning."""
        if not retrain:
            return step, self.state(step)
        for kept in sorted((kept for kept in self.kept if kept <= step), reverse=True):
            try:
                return kept, self.state(kept)
            except (CheckpointMissing, CheckpointCorrupt) as error:
                logger.warning("%s", error)
        return 0, None

    def _find(self, step: int) -> tuple[CheckpointStore, State]:
        if self.checkpoints is None:
            raise CheckpointMissing(_IN_TEMPORARY_FOLDER)
        state = self._states().get(step)
        if state is None or state.kept is None:
            kept = self.kept
            there = f"there are those after steps {', '.join(map(str, kept))}" if kept else "none of it is kept"
            raise CheckpointMissing(
                f"no checkpoint of trial {self.id} after step {step} is kept; {there}. "
                f"load(..., step={step}, retrain=True) trains it again in this process; checkpoint_every= and "
                f"checkpoint_budget= of optimize() decide what is kept"
            )
        return self.checkpoints, state

    def _search(self) -> SearchStarted:
        """Return the last search of the trial's study, which has one objective."""
        record = self.plan.searches.get(self.study)
        if record is None or len(record.started.metric) != 1:
            raise UsageError(f"step='best' needs a study with one objective; study {self.study!r} has another number")
        return record.started


def trial_of(
    plan: SearchPlan,
    checkpoints: CheckpointStore | None,
    id: TrialId,
    *,
    lineage: Lineage | None = None,
) -> TrainedTrial:
    """Return a trial of a plan. Raise :class:`UsageError` if the plan has no trial with that id."""
    planned: Mapping[TrialId, PlannedTrial] = plan.trials
    if id not in planned:
        proposed = plan.searches.proposed.get(id)
        if proposed is not None and proposed.rejected is not None:
            raise UsageError(f"trial {id!r} was not trained: the space rejected it ({proposed.rejected.summary})")
        ids: dict[str, list[TrialId]] = {}
        for known in planned:
            ids.setdefault(plan.study_of(known), []).append(known)
        there = "; ".join(f"{count_of(len(own), 'trial')}, {own[0]} to {own[-1]}" for own in ids.values())
        raise UsageError(
            f"this plan has no trial {id!r}; it has {there or 'none'}. A trial that was trained by other code, or on "
            f"another store, is on another plan: `hpstage status` lists the stores in .hpstage, and "
            f"hpstage.open(STORE).best_trial() returns the best trial of one"
        )
    return TrainedTrial(planned[id], plan, checkpoints, lineage)
