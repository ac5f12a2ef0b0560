"""What can be seen of a compiled step: the programs after every pass, what they will take, and why.

`inspection.py` has the whole of it, of a model, of a running one or of a bundle; `bundle.py` writes and reads bundles.
Each other file is one view of it.
"""
