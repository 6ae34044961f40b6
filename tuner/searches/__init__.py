"""Search on Ray with Optuna: the only package that imports either."""
