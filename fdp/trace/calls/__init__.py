"""What a step is called with and what it returns: roles, trees and signatures, and what it closes over."""
