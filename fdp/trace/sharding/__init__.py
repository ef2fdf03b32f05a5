"""Steps with sharded state: which values are divided among ranks, and the graph for one rank."""
