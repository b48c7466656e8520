"""A moving picture of ten seconds: a run, a search that branches from it, and a branch by hand, as they trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

import optuna
import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

import hpstage
from hpstage import schedule as s
from hpstage.accounting.book import Book
from hpstage.accounting.branches import branches_of, rows

SECONDS, REST = 10.0, 2.5  # of a round, and of these at its end, when all is drawn
LEFT, TOP, STEP, ROW, FOOT = 20, 88, 8.5, 17, 34  # pixels; of a step and of a row
CODE = (
    'run = hpstage.train(Digits(), {"lr": s.cosine(0.5, T_max=60), ...}, steps=60)',
    "hpstage.optimize(study, Digits(), lambda trial: run.then({...}, at=...), ...)",
    "best.branch(at=50, lr=0.02, steps=80)",
)
COLOURS = ("#0072B2", "#009E73", "#D55E00")


class Digits(hpstage.torch.TorchTrainable):
    device = "cpu"

    def dataset(self) -> TensorDataset:
        images, labels = (torch.tensor(values) for values in load_digits(return_X_y=True))
        self.held_out = images[1500:].float() / 16, labels[1500:]
        return TensorDataset(images[:1500].float() / 16, labels[:1500])

    def model(self, hp: Mapping[str, Any]) -> torch.nn.Module:
        return torch.nn.Linear(64, 10)

    def optimizer(self, model: torch.nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=hp["lr"])

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model: torch.nn.Module) -> Mapping[str, float]:
        images, labels = self.held_out
        return {"accuracy": (model(images).argmax(1) == labels).double().mean().item()}


def trained(store: Path) -> list[set[str]]:
    """Train, and return the trials of each phase."""
    here: dict[str, Any] = {"executor": hpstage.InlineExecutor(), "store": store, "checkpoint_every": 5}
    run = hpstage.train(Digits(), {"lr": s.cosine(0.5, T_max=60), "batch_size": 64}, steps=60, **here)

    def space(trial: optuna.Trial) -> dict[str, Any]:
        at = trial.suggest_categorical("at", [20, 35, 50])
        changed = {"lr": trial.suggest_categorical("lr", [0.4, 0.1]), "batch_size": 256}
        return run.then({name: changed[name] for name in ("lr", "batch_size")[: 1 + at % 2]}, at=at)

    study = optuna.create_study(
        study_name="search", direction="maximize", sampler=optuna.samplers.BruteForceSampler(seed=1)
    )
    result = hpstage.optimize(study, Digits(), space, metric="accuracy", steps=60, n_trials=6, **here)
    branch = result.branch(result.best_trial, at=50, lr=0.02, steps=80, executor=here["executor"])
    return [{run.id}, {result.trial(one).id for one in study.trials}, {branch.id}]


def pieces(book: Book, phases: list[set[str]]) -> Iterator[tuple[int, Any, int, int]]:
    """Yield what was trained: the phase, the node, and its steps from and to, in the order of training."""
    for charge in book.charges:
        phase = next(number for number, trials in enumerate(phases) if charge.trial in trials)
        if charge.fact.step > charge.fact.start:
            yield phase, book.account.plan.nodes[charge.fact.node], charge.fact.start, charge.fact.step


def moving(book: Book, phases: list[set[str]]) -> str:
    """Return the picture as SVG, which shows all of it where nothing moves."""
    branches = branches_of(book.trials)
    place = {node: TOP + ROW * row for node, row in rows(list(branches.values())).items()}
    parts = list(pieces(book, phases))
    whole, saved = sum(stop - start for *_, start, stop in parts), book.savings
    width, height = LEFT * 2 + STEP * 80, max(place.values()) + FOOT
    drawn, done, begins = [], 0, {}
    for phase, node, start, stop in parts:
        begin = done / whole * (SECONDS - REST) / SECONDS
        begins.setdefault(phase, begin)
        done += stop - start
        end = done / whole * (SECONDS - REST) / SECONDS
        x, y, above = LEFT + STEP * start, place[node.id], place[node.parent.id] if node.parent else place[node.id]
        fork = f"M{x} {above}V{y}" if start == node.start else f"M{x} {y}"
        drawn.append(
            f'<path d="{fork}H{LEFT + STEP * stop + 0.5}" pathLength="1" stroke="{COLOURS[phase]}"><animate '
            f'attributeName="stroke-dashoffset" values="1;1;0;0" keyTimes="0;{begin:.4f};{end:.4f};1" {_ROUND}/></path>'
        )
    for phase, code in enumerate(CODE):
        drawn.append(
            f'<text x="{LEFT}" y="{20 + 20 * phase}" fill="{COLOURS[phase]}">{escape(code)}<animate attributeName='
            f'"opacity" calcMode="discrete" values="0.25;1;1" keyTimes="0;{begins[phase]:.4f};1" {_ROUND}/></text>'
        )
    sums = f"{saved.trials} trials: {saved.steps_trained:,} steps trained of {saved.steps_asked:,}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height}" font-family="monospace" font-size='
        f'"13"><title>{sums}</title><g fill="none" stroke-width="5" stroke-dasharray="1">{"".join(drawn)}</g>'
        f'<text x="{LEFT}" y="{height - 6}" fill="#888">{sums}</text></svg>\n'
    )


_ROUND = f'dur="{SECONDS}s" repeatCount="indefinite"'
