"""Keep the memory of a target folder: records, locks, publication, the commit."""
