"""Collectives over pytrees, and the operators that stand for them in a traced graph.

operators -> markers -> transposes, over_pytrees -> exchanges
"""
