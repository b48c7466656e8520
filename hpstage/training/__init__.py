"""What a training function is, and what its steps see."""
