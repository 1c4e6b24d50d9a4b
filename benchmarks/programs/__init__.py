"""What is timed, each in a fresh process: ours, and peers written as their users write them."""
