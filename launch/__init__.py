"""How to run it: the only place with files, flags, logging and processes."""
