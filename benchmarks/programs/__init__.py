"""The programs that are timed, each in a fresh process: ours, and those of peers, written as their users write them."""
