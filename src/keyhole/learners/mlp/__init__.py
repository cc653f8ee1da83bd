"""Networks with one hidden layer."""
