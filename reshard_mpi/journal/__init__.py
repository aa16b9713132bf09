"""What a target folder remembers of its runs: records, locks, publication, the commit."""
