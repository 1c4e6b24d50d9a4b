"""The optimizers that torch does not have, a file each; `plan/optimizers.py` has their rows."""
