"""Soups: models whose weights are averaged over several states, without further training.

Wortsman et al., "Model soups" (arXiv 2203.05482), the uniform one; along one trial it is stochastic weight averaging
(Izmailov et al., arXiv 1803.05407), as Hägele et al. (arXiv 2405.18392) use it instead of a decay.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from hpstage.checkpoints import FolderCheckpoints
from hpstage.errors import UsageError
from hpstage.plan.facts import StateKey, TrialId
from hpstage.search.results.loading import LoadedState, leaves_of, load, weights_of, write_weights
from hpstage.search.results.trial import Step, TrainedTrial

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger("hpstage")


@dataclass(frozen=True, slots=True)
class Soup:
    """A model whose weights are the mean of those of several states, and its metrics."""

    members: tuple[tuple[TrialId, int], ...]
    """The states that were averaged, each as a trial and a number of steps."""
    metrics: dict[str, float]
    """The metrics that the trainable measures."""
    state: Any = field(repr=False)
    """The averaged state, as it would be saved: that of the first member, with its weights replaced by the means."""
    loaded: LoadedState = field(repr=False)
    """The averaged state, loaded into new objects."""
    key: StateKey
    """Identifies the state: a digest of what was averaged."""
    workload: StateKey = field(repr=False)

    @property
    def model(self) -> Any:
        """The model, in the mode in which it was trained: call ``model.eval()`` before you use it."""
        return self.loaded.model

    def weights(self, *, part: str | None = None) -> dict[str, Tensor]:
        """Return the averaged tensors by name; see :meth:`TrainedTrial.weights`."""
        return weights_of(self.state, part, self._name)

    def save_weights(self, path: str | os.PathLike[str], *, part: str | None = None) -> None:
        """Write :meth:`weights` into a file that safetensors reads, with the members and metrics as its metadata."""
        about = {"members": self._name, "part": part or ""}
        write_weights(path, self.weights(part=part), about, self.metrics)

    def save(self, folder: str | os.PathLike[str]) -> str:
        """Keep the state as a checkpoint in a folder of soups, which is made if needed, and return its path.

        ``FolderCheckpoints(folder, soup.workload).load(soup.key)`` reads it. A soup is not part of the plan: keep it
        out of the folder of the plan's checkpoints, where ``hpstage gc`` removes what the plan does not name.
        """
        checkpoints = FolderCheckpoints(folder, self.workload)
        checkpoints.save(self.key, self.state, step=self.loaded.step, parent=None)
        return checkpoints.unpack(self.key)

    @property
    def _name(self) -> str:
        return ", ".join(f"{trial} after step {step}" for trial, step in self.members)


def soup_of(trials: Sequence[tuple[TrainedTrial, Step]], trainable: object, *, part: str = "model") -> Soup:
    """Average saved states; see :meth:`Result.soup`."""
    members = sorted({(trial.id, trial.step(step)): trial for trial, step in trials}.items())
    if len(members) < 2:
        raise UsageError(f"a soup needs at least two states; there is {len(members) or 'none'}")
    states = [trial.state(step) for (_, step), trial in members]
    names = [f"{id} after step {step}" for (id, step), _ in members]
    state = _averaged(states, part, names)
    if isinstance(state, dict) and "metrics" in state and "captured" in state:
        state["metrics"] = None  # the state of a function holds the first member's
    (_, step), first = members[0]
    loaded = load(
        trainable,
        state,
        start=step,
        stop=step,
        values=first.hyperparameters,
        trial=first.id,
        name=f"the average of {', '.join(names)}",
        metrics=None,
        evaluate=True,
    )
    if loaded.metrics == first.metrics.get(step):
        logger.warning(
            "The soup has exactly the metrics of its first member, %s. If evaluation uses other weights than %r, "
            "name them with part=, such as 'self.ema'.",
            names[0],
            part,
        )
    keys = [trial.plan.key(trial.planned.node_at(step), step) for (_, step), trial in members]
    key = StateKey(blake2b("/".join(["hpstage-soup-1", part, *keys]).encode(), digest_size=16).hexdigest())
    found = tuple(member for member, _ in members)
    return Soup(found, loaded.metrics or {}, state, loaded, key, first.plan.workload)


def _averaged(states: Sequence[Any], part: str, names: Sequence[str]) -> Any:
    """Return a copy of the first state, in which the floating-point tensors of ``part`` are means over all."""
    leaves = [leaves_of(state, part, name) for state, name in zip(states, names, strict=True)]
    shapes = [{key: tuple(leaf.shape) for key, leaf in own.items()} for own in leaves]
    for own, name in zip(shapes, names, strict=True):
        if own != shapes[0]:
            differ = sorted({key for key, _ in own.items() ^ shapes[0].items()})
            raise UsageError(
                f"the weights of {names[0]} and of {name} have no mean: they differ in names or shapes "
                f"({', '.join(differ[:5])})"
            )
    means = {id(leaf): _mean([own[key] for own in leaves]) for key, leaf in leaves[0].items()}
    return _replaced(states[0], means)


def _mean(leaves: Sequence[Any]) -> Any:
    """Return the mean of floating-point tensors or arrays; of others, such as counters, the first."""
    import torch

    first = torch.as_tensor(leaves[0])
    if not (first.is_floating_point() or first.is_complex()):
        return leaves[0]
    wide = torch.complex128 if first.is_complex() else torch.float64
    mean = torch.stack([torch.as_tensor(leaf).to(wide) for leaf in leaves]).mean(0).to(first.dtype)
    return mean if isinstance(leaves[0], torch.Tensor) else mean.numpy()


def _replaced(tree: Any, means: Mapping[int, Any]) -> Any:
    if id(tree) in means:
        return means[id(tree)]
    if isinstance(tree, Mapping):
        return {key: _replaced(value, means) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_replaced(value, means) for value in tree)
    return tree
