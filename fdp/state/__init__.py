"""State on many ranks: equal on all, or labelled as each rank's own; on disk.

labels, rank_local -> replicate; index, pieces, unwritten -> storage; replicate, storage -> checkpoint
"""
