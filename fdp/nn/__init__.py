"""Modules as pure functions: of their parameters and buffers, and with statistics of all ranks.

meta_copy, batch_norm -> modules
"""
