"""Before anything is spent: what a search will take."""
