"""Conversations: read from rows, rendered by a chat template, tokenized with the exact mask of what is trained."""
