"""Edits of training code, each as one text with a gap: what fills the gap decides training, or does not."""
