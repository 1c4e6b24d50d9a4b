"""Renders a plan for systems that start the workers themselves: Slurm, Kubernetes, Accelerate."""
