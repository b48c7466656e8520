"""The cost of a book's trials, and what they would have cost alone."""

from __future__ import annotations

import math

from hpstage.plan.facts import NodeId, StageFailed, TrialId
from hpstage.plan.savings import Savings, merged, shortest_makespan
from hpstage.report.book import Book
from hpstage.report.pauses import most_at_once
from hpstage.scheduler.widths import measured_speeds


def savings_of(book: Book) -> Savings:
    """Return the savings of a study, or of all studies of a plan, from its journal. The work of earlier calls counts.

    Seconds of work are rounded to 2**-20 s, so their sums are exact. A study is charged what its trials asked for
    first, which is nothing where another study had already trained the same. ``steps_trained`` counts the steps that it
    is charged. ``workers`` is the largest number of workers present at the same time. ``makespan`` is the time from the
    start of the first stage to the last report, on the workers' clock, without the pauses between calls.
    """
    plan = book.account.plan
    facts = [charge.fact for charge in book.charges]
    wastes = [waste.fact for waste in book.wastes]
    spent = book.spent
    steps_trained = sum(fact.step - fact.start for fact in facts)
    worked = book.workers.values()
    first, last = min((its.first for its in worked), default=0.0), max((its.last for its in worked), default=0.0)
    workers = most_at_once(period for periods in book.presence.values() for period in periods)
    together = merged(plan, book.trials.values())
    longest = max(book.alone.values(), default=0.0)
    fleet = measured_speeds(facts, plan.step_times, workers)
    bound = shortest_makespan(plan, book.trials.values(), max(1, workers), fleet)
    # The bound does not apply if something was trained before the searches began.
    began_with = [plan.searches[study].before.steps_trained for study in book.studies if study in plan.searches]
    whole = steps_trained >= together.steps_unique and len(book.studies) == 1 and not any(began_with)
    return Savings(
        trials=len(book.trials),
        failed=sum(1 for id, ended in plan.ended.items() if ended.state == "FAIL" and book.is_mine(id)),
        steps_asked=together.steps_asked,
        steps_unique=together.steps_unique,
        steps_trained=steps_trained,
        steps_shared=max(0, together.steps_done - steps_trained),
        steps_wasted=sum(fact.steps for fact in wastes),
        merge_rate=together.rate,
        cost_weighted_merge_rate=together.cost_weighted_rate,
        worker_seconds=spent.train + spent.load + spent.evaluate + spent.save + spent.wasted,
        worker_seconds_alone=math.fsum(book.alone.values()),
        paid_seconds=plan.presence.seconds(book.study),
        train_seconds=spent.train,
        evaluate_seconds=spent.evaluate,
        load_seconds=spent.load,
        save_seconds=spent.save,
        wasted_seconds=spent.wasted,
        fused_seconds=spent.fused,
        exchange_seconds=spent.exchange,
        critical_path_seconds=longest,
        lower_bound_seconds=bound if whole and bound else None,
        kept=len(plan.kept),
        kept_bytes=plan.kept_bytes,
        makespan=book.pauses.elapsed(first, last),
        workers=workers,
        audited_share=book.account.audits.share(plan),
        audit_seconds=book.account.audits.seconds,
        audit_differences=book.account.audits.differences,
    )


def failures_of(book: Book) -> list[tuple[StageFailed, list[TrialId]]]:
    """Return the exceptions of the user's code on the paths of the book's trials, and the trials failed by each."""
    found: list[tuple[StageFailed, list[TrialId]]] = []
    by_node: dict[NodeId, list[tuple[StageFailed, list[TrialId]]]] = {}
    for fact in book.account.failures():
        reach = book.reach.get(fact.node, 0)
        if book.study is None or (fact.step <= reach if fact.evaluating else fact.step < reach):
            found.append((fact, []))
            by_node.setdefault(fact.node, []).append(found[-1])
    for id, trial in book.trials.items():
        ended = book.account.plan.ended.get(id)
        if not by_node or (ended is not None and ended.state != "FAIL"):
            continue
        for node, start, stop in trial.path_to(trial.asked):
            for fact, trials in by_node.get(node.id, []):
                if fact.evaluating:
                    passes = start < fact.step <= stop and fact.step in trial.targets
                else:
                    passes = fact.step < stop
                if passes:
                    trials.append(id)
    return found
