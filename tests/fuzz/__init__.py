"""Random models under random plans, held against plain PyTorch. `docs/fuzzing.md` says how to run it and how to read what it prints.

A case is its seed: `case.draw` makes every choice from it, `source.render` writes the case as a Python program, `runner.run` runs that program
plainly and compiled and compares the two. What fails is made smaller (`shrink`) and written as a script that stands alone.
"""
