"""Deduction of signatures for a whole function, from its jaxpr.

Read in this order: `region` (the function as a flat list of operations), `axis` (how
one mesh axis is decided), `walk` (operation by operation), `control_flow` (loops and
branches), `cut` (where partial sums are added up), `program` (the decisions of all
axes, with the conversions they need), `execute` and `kernels` (what each device runs),
`compiling` (one jitted program, and its derivative).
"""
