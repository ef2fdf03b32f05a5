"""Seconds of operations and messages: measured costs, estimates, and the network.

costs, network -> estimate, forecast, ticks
"""
