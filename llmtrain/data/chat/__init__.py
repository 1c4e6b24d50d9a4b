"""Conversations: read from rows, rendered by a chat template, and tokenized with an exact mask of trained tokens."""
