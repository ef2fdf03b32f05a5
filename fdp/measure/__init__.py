"""Seconds of operations and messages, on this machine and between these ranks.

clock, fit -> agreed -> link, device_speed; operations; intervals -> profile
"""

from fdp.measure.agreed import agreed_costs
from fdp.measure.device_speed import measure_machine
from fdp.measure.link import measure_link, measure_network
from fdp.measure.operations import measure_agreed_costs, measure_costs
from fdp.measure.profile import profile_step

__all__ = [
    "agreed_costs",
    "measure_agreed_costs",
    "measure_costs",
    "measure_link",
    "measure_machine",
    "measure_network",
    "profile_step",
]


def __dir__() -> list[str]:
    return [*__all__, "__doc__"]
