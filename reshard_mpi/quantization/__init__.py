"""Know quantized weights: which stored tensors make up one, and how their axes belong together."""
