"""Publishing on the hub: the model card and the upload."""
