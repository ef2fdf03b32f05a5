"""State on many ranks: equal on all, or labelled as each rank's own; on disk.

labels, shards -> containers -> replicate, shard; index, pieces, unwritten -> storage; replicate, storage -> checkpoint
"""
