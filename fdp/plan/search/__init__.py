"""Which cuts into buckets are the best: by dynamic programming over the gradients in the order of their production.

chain -> layers -> optimum -> planner
"""
