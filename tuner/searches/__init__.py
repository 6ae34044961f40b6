"""Search on Ray Tune with Optuna: the only package that imports either."""
