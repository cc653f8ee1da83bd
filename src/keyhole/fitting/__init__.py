"""Exact forward models and least squares.

For any model: gauss_newton (the solver), torch_model (a forward model from a torch function),
bootstrap. For attention: layer_gauss_newton (all answers
of a layer); attention_rows, variable_projection, levenberg_marquardt, preconditioner, fisher and
initial_guess (labelled rows).
"""
