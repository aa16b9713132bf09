"""Know a checkpoint as a whole: its files, tensors and holders; lost and replaced shards."""
