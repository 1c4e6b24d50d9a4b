"""Trained models in use: loaded with all checks, and continuing texts."""
