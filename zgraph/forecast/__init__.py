"""What a step will take at other sizes, worlds and plans. (Of a program as it is, `zgraph.passes.analysis.simulator` says it.)"""
