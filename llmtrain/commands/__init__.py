"""Implements the commands of `cli`, after their options are parsed. Each module imports what it needs when it runs."""
