"""Ray Tune; each actor trains many trials, or one with ``--new-actors``."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import ray
import shared_task as task
from ray import tune
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler


def main() -> None:
    options = task.parse()
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"
    here = os.path.dirname(os.path.abspath(__file__))
    ray.init(
        num_cpus=options.workers,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])}},
    )

    def trained(given: dict[str, Any]) -> None:
        def report(found: dict[str, float]) -> bool:
            tune.report({**found, "reported_step": int(found["step"])})
            return True  # Ray ends the function itself

        task.train(given["point"], options, report)

    asha = ASHAScheduler(
        time_attr="reported_step",
        grace_period=task.first_rung(options.steps),
        max_t=options.steps,
        reduction_factor=task.REDUCTION,
    )
    with tempfile.TemporaryDirectory() as folder:
        tuner = tune.Tuner(
            tune.with_resources(trained, {"cpu": 1}),
            param_space={"point": tune.grid_search(task.points(options))},
            tune_config=tune.TuneConfig(
                metric="accuracy",
                mode="max",
                scheduler=asha if options.algorithm == "asha" else FIFOScheduler(),
                max_concurrent_trials=options.workers,
                reuse_actors=not options.new_actors,
            ),
            run_config=tune.RunConfig(storage_path=folder, verbose=0),
        )
        found = [dict(result.metrics) for result in tuner.fit()]
    ray.shutdown()
    task.finish(found, {"ray": ray.__version__})


if __name__ == "__main__":
    main()
