"""A step with sharded state: which values lie in parts, and the graph for one rank that holds its own."""
