"""The seconds that a search saved compared with training every trial without sharing, by cause. Pure.

All seconds are worker seconds, rounded to 2**-20 s (:func:`hpstage.accounting.payments.rounded`), so sums are exact.

Rules and assumptions:

- A step takes the mean measured time of its node and an evaluation the mean of the plan, as in
  :func:`hpstage.accounting.savings.seconds_alone`. Without sharing, a trial neither loads nor saves, so savings are
  underestimated.
- A trial counts up to its last result. A trial that ended without failing would have been trained to its end if it had
  not been stopped; the evaluations it would have had there are not counted. A trial that failed or has not ended is
  assumed to get no further without sharing. The same applies to a trial that another one extends (``extend=True``),
  since the extending trial counts as a whole.
- A fork of population based training counts as a separate trial, including the steps of its donor.
- If two trials request the same step, the later one shares it; the same applies to evaluations of a state. The rule
  also holds between studies: a study is charged for what it requested first, even if the other would have needed it
  sooner.
- If a worker trained several chains side by side, or several workers trained one chain, the mean times are those of a
  worker that trains nothing else, as far as they are known (:attr:`hpstage.plan.facts.StateReached.alone_seconds`).
- A chain that continued from a live state would have loaded it from disk, in the mean time of the measured loads from
  disk. If there were none, this is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpstage.accounting.account import Account
from hpstage.accounting.book import Book
from hpstage.accounting.pauses import united
from hpstage.accounting.payments import rounded
from hpstage.plan.facts import NodeId, TrialId, WorkerId
from hpstage.plan.nodes import PlannedTrial
from hpstage.plan.plan import SearchPlan


@dataclass(frozen=True, slots=True)
class Causes:
    """Worker seconds of a book's trials, by cause.

    To the last bit::

        full - early_stopping == alone
        alone - shared_prefix - other_study - fused + exchange
            + from_disk - live + save + wasted + again + unanswered + estimates == used
        train + evaluate + load + save + wasted == used
        from_disk - live == load
    """

    full: float
    """Every trial without sharing, to its end."""
    early_stopping: float
    """Steps after the last result of trials that have ended."""
    alone: float
    """Every trial without sharing, up to its last result."""
    shared_prefix: float
    """Steps and evaluations that another trial of the same study had requested first."""
    other_study: float
    """Steps and evaluations that a trial of another study had requested first."""
    fused: float
    """Training time that workers saved by training chains side by side."""
    exchange: float
    """Additional training time because several workers trained a chain together."""
    from_disk: float
    """Loading, if every chain that continued from a state had loaded it from disk."""
    live: float
    """Loading time saved because states were live."""
    save: float
    wasted: float
    """Training that was discarded."""
    again: float
    """Repeated training of steps whose states were lost or not worth keeping."""
    unanswered: float
    """Training for trials without a result at these steps: they failed, are running, or were given up."""
    estimates: float
    """The remainder: means instead of measured times; stages charged to a trial of another study, though some of
    their steps had been requested here, or vice versa; failed evaluations."""
    used: float
    """Seconds of workers that are charged to these trials."""
    train: float
    evaluate: float
    load: float
    idle: float
    """Seconds between a worker's first and last work for these trials without any reported work, as far as it was
    present (:attr:`hpstage.accounting.book.Book.presence`). The journal does not record waiting before and after. Idle
    time is charged to no trial and not part of ``used``."""

    early_steps: int
    prefix_steps: int
    other_steps: int
    again_steps: int


def causes_of(book: Book) -> Causes:
    """Return the causes of a book's savings. O(segments of its trials + stages)."""
    account = book.account
    plan = account.plan
    answered, seconds_alone = book.answered, book.alone
    carried_on = {proposed.extends for proposed in account.plan.searches.proposed.values()}
    study_of = {id: account.plan.study_of(id) for id in plan.trials}
    alone = early = prefix = other = 0.0
    early_steps = prefix_steps = other_steps = 0
    for id, trial in book.trials.items():
        alone += seconds_alone[id]
        ended = plan.ended.get(id)
        results = answered[id]
        last = results[-1] if results else 0
        if last < trial.steps and ended is not None and ended.state != "FAIL" and id not in carried_on:
            early += rounded(_after(plan, trial, last))
            early_steps += trial.steps - last
        if not results:
            continue
        same, same_steps, others, others_steps = _shared(account, trial, results, study_of)
        prefix += rounded(same)
        prefix_steps += same_steps
        other += rounded(others)
        other_steps += others_steps

    sums = book.sums
    load, save, wasted = sums.load_seconds, sums.save_seconds, sums.wasted_seconds
    used = sums.worker_seconds
    live = _live(book)
    again, again_steps, unanswered = _beyond(book)
    changed = sums.exchange_seconds - sums.fused_seconds
    known = alone - prefix - other + changed + load + save + wasted + again + unanswered
    return Causes(
        full=alone + early,
        early_stopping=early,
        alone=alone,
        shared_prefix=prefix,
        other_study=other,
        fused=sums.fused_seconds,
        exchange=sums.exchange_seconds,
        from_disk=load + live,
        live=live,
        save=save,
        wasted=wasted,
        again=again,
        unanswered=unanswered,
        estimates=used - known,
        used=used,
        train=sums.train_seconds,
        evaluate=sums.evaluate_seconds,
        load=load,
        idle=idle_seconds(book),
        early_steps=early_steps,
        prefix_steps=prefix_steps,
        other_steps=other_steps,
        again_steps=again_steps,
    )


def _after(plan: SearchPlan, trial: PlannedTrial, last: int) -> float:
    """Return the seconds of training the trial from step ``last`` to its end, at the measured seconds per step."""
    legs = [(node, max(start, last), stop) for node, start, stop in trial.path_to(trial.steps) if stop > last]
    return sum((stop - start) * plan.step_seconds(node) for node, start, stop in legs)


def _shared(
    account: Account, trial: PlannedTrial, answered: Sequence[int], study_of: Mapping[TrialId, str]
) -> tuple[float, int, float, int]:
    """Return the seconds and steps that another trial requested first, of the same study and of other studies."""
    plan = account.plan
    mine = trial.id
    study = study_of[mine]
    same = others = 0.0
    same_steps = others_steps = 0
    for node, start, stop in trial.path_to(answered[-1]):
        cost = plan.step_seconds(node)
        for begin, end, requester in account.first_requests(node, start, stop):
            if requester is trial:
                continue
            if study_of[requester.id] == study:
                same += (end - begin) * cost
                same_steps += end - begin
            else:
                others += (end - begin) * cost
                others_steps += end - begin
    for step in answered:
        first = account.requests[trial.node_at(step).id, step].first
        if first is None or first == mine:
            continue
        evaluation = plan.totals.average_evaluate_seconds
        if study_of[first] == study:
            same += evaluation
        else:
            others += evaluation
    return same, same_steps, others, others_steps


def _live(book: Book) -> float:
    """Return the time that forks from live states saved compared to the plan's mean load from disk."""
    loads = [charge.fact.load_seconds for charge in book.account.charges if charge.fact.source == "disk"]
    if not loads:
        return 0.0
    mean = sum(loads) / len(loads)
    facts = (charge.fact for charge in book.charges)
    return sum((rounded(mean - fact.load_seconds) for fact in facts if fact.source in ("live", "continued")), 0.0)


def _beyond(book: Book) -> tuple[float, int, float]:
    """Return parts of the training charged to the book's trials: the seconds and steps of repeated training, and the
    seconds of training steps for the first time for trials without a result at or after them."""
    again = unanswered = 0.0
    again_steps = 0
    account, answered = book.account, book.answered
    plan = account.plan
    last = {id: results[-1] if results else 0 for id, results in answered.items()}
    # On all other nodes, every step has a result at or after it for the trial that requested it first.
    behind = {
        node.id
        for id, trial in plan.trials.items()
        if last[id] < trial.requested
        for node, start, stop in trial.path_to(trial.requested)
        if any(requester is trial for _, _, requester in account.first_requests(node, start, stop))
    }
    trained: dict[NodeId, list[tuple[int, int]]] = {}  # disjoint, in order
    for charge in account.charges:
        fact = charge.fact
        id, start, stop = fact.node, fact.start, fact.step
        if start == stop:
            continue
        fresh = [(start, stop)]
        known = trained.get(id)
        if known is None:
            trained[id] = [(start, stop)]
            if id not in behind:
                continue
        elif known[-1][1] < start:
            known.append((start, stop))
        else:
            fresh = _gaps(known, start, stop)
            trained[id] = united([*known, *fresh])
        repeated = stop - start - sum([end - begin for begin, end in fresh])
        if (not repeated and id not in behind) or not book.is_mine(charge.trial):
            continue
        if repeated:
            again_steps += repeated
            again += rounded(fact.own_seconds * repeated / (stop - start))
        if id in behind:
            vain = sum(
                end - max(begin, min(end, last[requester.id]))
                for part in fresh
                for begin, end, requester in account.first_requests(plan.nodes[id], *part)
            )
            unanswered += rounded(fact.own_seconds * vain / (stop - start))
    return again, again_steps, unanswered


def _gaps(known: list[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """Return the parts of ``[start, stop)`` that are not in ``known``."""
    found: list[tuple[int, int]] = []
    at = start
    for begin, end in known:
        if begin >= stop:
            break
        if end > at:
            if begin > at:
                found.append((at, begin))
            at = end
    if at < stop:
        found.append((at, stop))
    return found


def idle_seconds(book: Book) -> float:
    """Return :attr:`Causes.idle`."""
    # Never below 0: workers of two clusters may have the same name.
    idle = (rounded(max(0.0, present_seconds(book, worker) - its.seconds)) for worker, its in book.workers.items())
    return sum(idle, 0.0)


def present_seconds(book: Book, worker: WorkerId) -> float:
    """Return the seconds from the first to the last work of a worker, without those between calls."""
    its = book.workers[worker]
    return sum(min(stop, its.last) - max(start, its.first) for start, stop in book.presence[worker])
