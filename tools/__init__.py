"""Programs for the repository itself: `python tools/render.py` writes generated files; hooks of the site."""
