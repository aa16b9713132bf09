"""A checkpoint as a whole: which files it has, which tensors, who holds what; lost and replaced shards."""
