"""When there is memory: admission of what transforms a target, shared by all processes of a user on a host."""
