"""Log rules: their language, how they are checked and compiled, and the directories that hold them."""
