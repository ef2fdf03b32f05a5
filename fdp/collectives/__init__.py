"""Collectives over pytrees, and the operators that stand for them in a traced graph.

markers -> transposes -> over_pytrees
"""
