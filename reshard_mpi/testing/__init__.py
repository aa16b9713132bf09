"""For authors of further formats: a conformance suite to subclass, and hypothesis strategies for what shards hold.

Needs the `test` extra (pytest, hypothesis); nothing else of the program imports it.
"""
