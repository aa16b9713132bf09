"""For authors of further formats: conformance suites to subclass, and hypothesis strategies for contents of shards.

Needs the `test` extra (pytest, hypothesis). No other part of the program imports it.
"""
