"""The process group and its store: which ranks there are, and what they tell each other.

collective: what ranks can do with a value; sending -> messages -> group -> exchange, desynchronised; other_ranks: what
stands for them where nothing is sent; wire: in which dtype gradients are sent; comparable, fingerprint, header: what is
compared
"""
