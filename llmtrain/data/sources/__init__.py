"""The documents of a recipe's sources: from files, from the hub, and what is read in them."""
