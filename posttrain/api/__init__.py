"""The Python interface: functions that take models, data and rewards as Python objects, and runs that return results as values.

`import posttrain as pt` provides all of it; docs/python.md describes it. A function builds the same stages as the command line, runs
them in the same way, and writes the same run directory.
"""
