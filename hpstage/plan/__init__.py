"""What is known of trials and states: events, and the fold that they are put into. Pure."""
