"""What the hub gets: a model card, and the upload."""
