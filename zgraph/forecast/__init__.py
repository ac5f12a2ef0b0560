"""Forecasts of a step at other sizes, worlds and plans. (`zgraph.passes.analysis.simulator` forecasts a program as it
is.)"""
