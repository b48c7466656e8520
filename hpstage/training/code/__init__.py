"""The code that training reaches: whose it is, what it names, what it may read and change."""
