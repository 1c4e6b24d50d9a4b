"""What the commands of `cli` do, beside reading their options. Each imports what it needs when it runs."""
