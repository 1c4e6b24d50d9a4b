"""Weights that are held in fewer bits than they are computed with."""
