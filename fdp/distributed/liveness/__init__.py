"""Who is alive: a small process beside each rank watches it, and tells those of the other ranks.

fault: what became of a rank; status: what a rank is doing, in memory that both see; news: what it is told there;
process: is it running; tree: what monitors tell each other; links, session, neighbour, connections: how; introduction:
how they find each other; monitor: the small process; watch: the rank's side of it; patience: waiting; threads: the end
of a process waits for them
"""
