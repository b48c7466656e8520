"""The read model: every figure of a search, from its journal alone. Pure.

Result, status, report, page, metrics, progress and exports take every figure from here: none of them computes its own.
The plan and the scheduler, which decide, use no figures.

**One fold.** :class:`hpstage.accounting.accounting.Accounting` folds the facts of a journal into three tables:

- *stages*: the reports of workers, and the trial that each report is charged to (:mod:`hpstage.accounting.payments`).
  The fold keeps how far and how long each node was trained, and the sums of each study
  (:mod:`hpstage.accounting.tally`). Readers that show single stages keep all of them
  (:mod:`hpstage.accounting.account`).
- *trials*: for each trial, the steps that were requested and those that have results.
- *requests*: for each state, the trials that requested it, in order; for each node, the trials that were the first to
  request its steps.

It also keeps which workers were present (:mod:`hpstage.accounting.presence`), the periods in which drivers worked,
the audits, and failures that no later call has got past.

**Its own pace.** The fold reads only those parts of the plan that no later fact changes: paths of trials as far as they
were requested, parents and starts of nodes, studies of trials. So it may lag behind the plan by any number of facts.
Readers and the live page fold each fact into the plan and then here. A driver folds here only when a figure is needed
(the end of a trial, a line of progress, the result), from the journal or from the facts that it has folded since. So
figures never delay a decision, and snapshots contain only what decisions read.

**Pure functions** over the tables and the plan: :mod:`savings`, :mod:`bound`, :mod:`causes`, :mod:`studies`,
:mod:`tables`, :mod:`timeline`, :mod:`failures`, :mod:`audits`. A :class:`hpstage.accounting.book.Book` is the part of
the tables that concerns one study.
"""
