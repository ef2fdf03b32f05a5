"""What things take, in seconds, on this machine and between these ranks.

clock, fit -> agreed -> network, operations, profile
"""

from fdp.measure.agreed import agreed_costs
from fdp.measure.network import measure_link, measure_network

__all__ = ["agreed_costs", "measure_link", "measure_network"]
