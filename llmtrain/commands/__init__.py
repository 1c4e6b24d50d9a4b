"""Implements the commands of `cli`, after their options are parsed. Modules import what they need when they run."""
