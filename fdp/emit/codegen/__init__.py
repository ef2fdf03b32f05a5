"""The text of a program that runs operator by operator: straight-line Python, operators bound to local names.

bindings, lines -> writer -> packing, added_products, shortcuts, loop_bodies -> calls -> program
"""
