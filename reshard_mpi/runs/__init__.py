"""Run a request: plan, divide, transform, verify, compare, report."""
