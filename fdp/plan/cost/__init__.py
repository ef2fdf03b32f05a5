"""What operations and messages take, in seconds: measured costs, estimates, and the network.

costs, network -> estimate, forecast, ticks
"""
