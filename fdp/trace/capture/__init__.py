"""One run of a step on fake tensors, and what else is seen, switched or put back while it runs: step -> flat graph."""
