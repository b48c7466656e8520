"""What is to be trained next, and where. Pure."""
