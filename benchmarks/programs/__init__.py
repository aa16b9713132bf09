"""Programs that are measured or measure: each runs by itself, in the interpreter that has what it needs."""
