"""Trials as runs of experiment trackers: TensorBoard, MLflow, Weights & Biases. Each needs its own package."""
