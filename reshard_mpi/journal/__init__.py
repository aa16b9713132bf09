"""Keep what a target folder knows of its runs: records, locks, publication, the commit."""
