"""Parts of PyTorch that are private, or near to it: each is relied on in one file.

parts: which they are, and what is refused where one is missing; dispatch, guards, recomputation, dynamo,
tensors
"""
