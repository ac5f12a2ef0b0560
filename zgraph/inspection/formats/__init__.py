"""Programs for other tools: one file for each form. (Text for people is `zgraph/program/text.py`, JSON `zgraph/program/serial.py`.)"""
