"""What the pictures of a report show, as plain values: pure, without matplotlib, small enough to be sent elsewhere."""
