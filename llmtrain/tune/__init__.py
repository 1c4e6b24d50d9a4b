"""Chooses kernels by measurement: what a recipe leaves open (`auto`) becomes what was fastest on this device.

A run asks `with_kernels`, which takes, in this order: what the same run took before, so that it continues bit for bit;
what was measured before for the same device, packages and shapes (a cache); a new measurement, where the run is long
enough to be worth one; the rules of `llmtrain.plan.kernels`. `llmtrain tune` measures in any case.
"""
