"""What a machine, and each host of a hostfile, can do for a run, what is wrong and what mends it; pure when loaded."""
