"""The Python interface: functions that take models, data and rewards as a program has them, and runs that give results as values.

`import posttrain as pt` finds all of it; docs/python.md describes it. A function builds the same stages as the command line and runs
them in the same way: what it makes is a run directory.
"""
