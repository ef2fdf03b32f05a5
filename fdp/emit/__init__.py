"""`Plan` -> program: where values lie (memory/), what is called (codegen/), or one compiled graph (compiled/).

memory -> codegen -> proved -> compiled
"""
