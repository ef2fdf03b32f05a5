"""Where the values of a step lie: how long each lives, which share memory, and which take the place of an argument.

views, constants, out_variants, layout, liveness -> donation, deferred_products -> planning -> instructions ->
memory_plan -> allocation -> decisions
"""
