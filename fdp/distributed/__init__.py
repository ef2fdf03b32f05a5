"""The process group and its store: which ranks there are, and what they exchange.

collective: the operations of ranks together; sending -> messages -> group -> exchange, desynchronised; other_ranks: the
other ranks in a dry run; wire: in which dtype gradients are sent; comparable, fingerprint, header: what ranks compare
"""
