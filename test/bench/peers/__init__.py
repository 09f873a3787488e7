"""The systems that are measured, one a file, each by its own public API or SQL."""
