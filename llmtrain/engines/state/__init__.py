"""The state of an engine in pieces: what each rank holds of each weight, how it is saved and restored."""
