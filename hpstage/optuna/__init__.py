"""The Optuna side: trials proposed by a study's sampler, results written back to it."""
