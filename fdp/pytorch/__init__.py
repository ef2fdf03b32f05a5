"""Parts of PyTorch that are private, or near to it: each is relied on in one file.

parts: which they are, and what is refused where one is missing; dispatch, dynamo, fake_modes, guards, overloads,
process_flags, recomputation, registries, tensors
"""
