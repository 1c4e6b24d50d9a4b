"""Tensor parallelism: modules split by a family's plan, what ranks exchange around them, and slices of the residual."""
