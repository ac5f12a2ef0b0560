"""Views of a compiled step: the programs after every pass, the time and memory that they take, and why.

`inspection.py` holds all of a step, of a model, of a running model or of a bundle; `bundle.py` writes and reads bundles.
Each other file is one view of an inspection.
"""
