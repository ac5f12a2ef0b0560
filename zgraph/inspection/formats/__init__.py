"""Programs for other tools: one file for each form. (Text for people is `zgraph/program/printer.py`, JSON `zgraph/program/serialize.py`.)"""
