"""Which ranks are alive: a small process beside each rank watches it, and reports to those of the other ranks.

fault: what became of a rank; status: what a rank is doing, in shared memory; news: what the rank reads there;
process: is it running; tree: what monitors exchange; links, session, neighbour, connections: how; introduction:
how they find each other; monitor: the small process; watch: the rank's side of it; patience: waiting; threads: the end
of a process waits for them
"""
