"""The grader of `math`: an answer is read into a small tree (latex.py), brought to one form (form.py) and compared (compare.py)."""
