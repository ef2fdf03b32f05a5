"""The best cuts into buckets: dynamic programming over the gradients in production order.

chain -> layers -> optimum -> planner
"""
