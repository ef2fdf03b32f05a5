"""The text of a program that runs operator by operator: straight-line Python, operators bound to local names.

bindings, lines -> writer -> packing, products, shortcuts, loops -> calls -> program
"""
