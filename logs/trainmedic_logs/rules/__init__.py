"""Log rules: format, compiler and library."""
