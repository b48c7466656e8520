"""The read model: every figure of a search, from its journal alone. Pure.

Result, status, report, page, metrics, progress and exports take every figure from here: none of them computes its own.
The plan and the scheduler, which decide, use no figures.

**One fold.** :class:`hpstage.accounting.accounting.Accounting` folds the facts of a journal into three tables:

- *stages*: what workers reported, and the trial that each report is charged to (:mod:`hpstage.accounting.payments`).
  Of each node it keeps how far and how long it was trained, and of each study the sums
  (:mod:`hpstage.accounting.tally`). Readers that show the stages one by one keep all of them
  (:mod:`hpstage.accounting.account`).
- *trials*: of each, the steps that were requested and those that have results.
- *requests*: of each state, the trials that requested it, in order, and of each node the trials that were the first to
  request its steps.

It also keeps which workers were present (:mod:`hpstage.accounting.presence`), the periods in which drivers worked,
the audits, and failures that no later call has got past.

**Its own pace.** Of the plan, the fold uses only what no later fact changes: paths of trials as far as they were
requested, parents and starts of nodes, studies of trials. So it may lag behind the plan by any number of facts. Readers
and the live page fold each fact into the plan and then here. A driver folds here only when a figure is needed (the
end of a trial, a line of progress, the result), from the journal or from the facts that it has folded since, so that
figures cost no decision any time, and snapshots hold no more than what decisions read.

**Pure functions** over the tables and the plan: :mod:`savings`, :mod:`bound`, :mod:`causes`, :mod:`studies`,
:mod:`tables`, :mod:`failures`, :mod:`audits`. A :class:`hpstage.accounting.book.Book` is the part of the tables that
concerns one study.
"""
