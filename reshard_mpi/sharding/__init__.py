"""Know who holds which part of a tensor: boxes, placements, layouts, strategy files."""
