"""Forward models of what is sought, with the products that a matrix-free fit needs."""
