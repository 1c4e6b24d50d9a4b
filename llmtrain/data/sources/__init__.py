"""Opens a recipe's sources, from files or the hub, and reads their documents."""
