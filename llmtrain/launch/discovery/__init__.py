"""Determines which worker a process is, and which network its ranks use; pure."""
