"""Deduction of signatures for a whole function, from its jaxpr.

Read in this order: `region` (the function as a flat list of operations), `axis` (which
rule each operation takes on one mesh axis), `control_flow` (loops and branches), `cut`
(where partial sums are best added up), `program` (the decisions of all axes, with the
conversions they need), `execute` (runs a program on each device).
"""
