"""Deal with file systems: paths that users give, folders held open, locks between hosts."""
