"""Training functions, and what they see at each step."""
