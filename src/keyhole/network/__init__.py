"""Networks with one hidden layer, whatever stands before and behind them."""
