"""The grader of `math`: it parses an answer into a small tree (latex.py), normalises it (form.py) and compares it (compare.py)."""
