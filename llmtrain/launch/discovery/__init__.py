"""Determines the rank of a worker under any launcher, and the network interfaces that ranks use."""
