"""The search plan: facts about trials and states, and their fold. Pure."""
