"""Translates configurations of other programs into recipes, and plans into configurations of other programs."""
