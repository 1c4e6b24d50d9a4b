"""Chooses kernels by measurement: what a recipe leaves open (`auto`) becomes what was fastest on this device.

A run calls `with_kernels`. It uses, in this order: what the same run used before, so that it continues bit for bit; an
earlier measurement for the same device, packages and shapes (a cache); a new measurement, if the run is long enough to
be worth one; the rules of `llmtrain.plan.kernels`. `llmtrain tune` always measures.
"""
