"""Programs for other tools, one file for each format. (Text for people is `zgraph/program/printer.py`, JSON
`zgraph/program/serialize.py`.)"""
