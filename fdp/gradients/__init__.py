"""Gradients over pytrees, of a batch at once or in microbatches.

autodiff -> accumulation
"""
