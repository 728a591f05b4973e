"""Measurements beside other packages: ``python -m benchmarks``, from the checkout. The product does not import it."""
