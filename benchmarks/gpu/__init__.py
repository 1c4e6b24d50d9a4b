"""Measures one GPU within the minutes it is given: `python -m benchmarks gpu --minutes 9 --out DIR`.

`cases` declares what is measured, in order of importance. `run` starts a process for each case and keeps what it finds;
`process` is such a process. `steps` times training steps, `checks` compares results, `peers` runs other libraries.
`page` shows the result beside the aims. Importing this package has no side effects.
"""
