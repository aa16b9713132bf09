"""Test further formats: conformance suites to subclass, and hypothesis strategies.

Needs the `test` extra (pytest, hypothesis). No other part of the program imports it.
"""
