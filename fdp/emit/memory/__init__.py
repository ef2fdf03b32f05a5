"""Memory planning: liveness of values, buffer reuse, and donation.

views, constants, out_variants, layout, liveness -> donation, deferred_products -> planning -> instructions ->
memory_plan -> allocation -> decisions
"""
